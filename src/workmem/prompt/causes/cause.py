"""The causes that a miss can have, and what is said of each: the one place with their names."""

from __future__ import annotations

import msgspec


class Cause(msgspec.Struct, frozen=True):
    """One way in which a request departs from continuing an earlier one."""

    name: str
    """A key of `KINDS`."""
    path: str
    """Where, in the later body; empty where it is nowhere in a body."""
    path_before: str
    """Where, in the earlier body; empty where nothing stood there."""
    what: str
    """What is different, in a sentence."""
    fix: str
    """What to do about it, in a sentence."""
    rule: str = ""
    """The canonical rule that would repair it; empty where none does."""


class Kind(msgspec.Struct, frozen=True):
    """What is true of every cause of one name."""

    why: str
    """What does this, in practice."""
    fix: str
    rule: str = ""
    is_loss: bool = True
    """Whether tokens are lost to it; a new conversation loses nothing, its tokens are new."""


_STABLE_FIRST = "Put it behind everything that stays the same: into the latest user message, or a message of its own there."

KINDS: dict[str, Kind] = {
    "billing_header": Kind(
        "Claude Code begins its instructions with a line for billing, and part of it changes from request to request.",
        "Set CLAUDE_CODE_ATTRIBUTION_HEADER=0 for the client, or leave the rule attribution_header on.",
        "attribution_header",
    ),
    "tool_order": Kind(
        "The client gathers its tools in the order of a map, a database or of connections.",
        "Send the tools in one order, by name for example.",
        "tool_order",
    ),
    "schema_key_order": Kind(
        "The client or an SDK writes the keys of an object in the order of a map, which differs by process.",
        "Write the keys of tools and of their schemas in one order.",
        "schema_key_order",
    ),
    "required_order": Kind(
        "`required` comes from a set, whose order is nobody's.",
        "Sort `required` in the schemas of tools.",
        "schema_key_order",
    ),
    "tool_added": Kind(
        "A server of tools was connected or has a new tool; tools stand before the conversation, so all of it moves.",
        "Load tools before the conversation starts, or announce new ones behind the history.",
    ),
    "tool_removed": Kind(
        "A tool was switched off or its server went away; tools stand before the conversation, so all of it moves.",
        "Keep the tool in the list and refuse its calls, or name those allowed in `tool_choice`.",
    ),
    "tool_changed": Kind(
        "Another version of a tool's server, or a description that is put together anew for each request.",
        "Change tools between conversations only, and keep what varies out of their descriptions.",
    ),
    "tool_description_order": Kind(
        "A description lists things (agents, files, modes) in the order of a map or of a folder.",
        "Sort the list before writing it into the description.",
        "description_line_order",
    ),
    "volatile_time": Kind(
        "A clock is printed before what stays the same.", _STABLE_FIRST, "volatile_to_tail"
    ),
    "volatile_date": Kind(
        "A date is printed before what stays the same: everything is computed anew each day.",
        _STABLE_FIRST,
        "volatile_to_tail",
    ),
    "volatile_id": Kind(
        "An id that is new for each request or session is printed before what stays the same.",
        _STABLE_FIRST,
        "volatile_to_tail",
    ),
    "volatile_path": Kind(
        "The working directory, a home or the state of a git checkout is printed before what stays the same.",
        _STABLE_FIRST,
        "volatile_to_tail",
    ),
    "volatile_version": Kind(
        "The version of a program is printed before what stays the same.", _STABLE_FIRST, "volatile_to_tail"
    ),
    "arguments_reserialised": Kind(
        "The client decodes the arguments of the model's calls and sends them back written another way.",
        "Send `arguments` back as the text that came.",
        "argument_form",
    ),
    "call_id_changed": Kind(
        "The client gives calls ids of its own; it matters where the model's template prints them.",
        "Send the ids of calls back as they came.",
        "call_ids",
    ),
    "reasoning_dropped": Kind(
        "The client does not send the model's thinking back.",
        "Send thinking back (`reasoning_content`, thinking blocks, reasoning items) for as long as the model's template keeps it.",
    ),
    "history_trimmed": Kind(
        "The client drops messages to stay within a limit; all behind the gap stands elsewhere now.",
        "Trim rarely and much (to half, say) instead of a message each turn, and never in front of what stays.",
    ),
    "history_rewritten": Kind(
        "A message that was sent before has another text now.",
        "Treat the history as a log: append, and say corrections in a new message.",
    ),
    "message_inserted": Kind(
        "A message stands between those that were sent before.",
        "Append it instead: all behind the place moves.",
    ),
    "whitespace": Kind(
        "The same words with other spaces or line ends: a trimmed answer, a template that was edited.",
        "Send texts as they were; do not trim or wrap them.",
    ),
    "system_changed": Kind(
        "The instructions are put together anew for each request, from parts that vary.",
        "Keep the instructions to what never changes, and put the rest behind the history.",
    ),
    "role_swapped": Kind(
        "Another agent, or a side call (a title, a summary), takes over the history under instructions of its own.",
        "Keep one head for all that read this history, and say the role in the last message.",
    ),
    "unordered_context": Kind(
        "The same pieces (search results, memories, files) come in another order.",
        "Sort the pieces, by an id or by name, before they are written.",
        "unordered_context",
    ),
    "floating_tail": Kind(
        "The client keeps a block at the end of every request and never in its history, so it moves each turn.",
        "Leave the block where it was sent and append what is new, or keep it short: only what comes after it is lost.",
        "floating_tail",
    ),
    "compaction": Kind(
        "The client replaced its history, or a part of it, by a summary.",
        "Nothing, where the context was full; compact rarely, and keep instructions and tools as they are.",
    ),
    "branched": Kind(
        "Both requests share a history and go on with another message: siblings, retries, an edited question.",
        "Nothing: what they share was shared.",
        is_loss=False,
    ),
    "model_or_template_options_changed": Kind(
        "Another model, or an option that the chat template reads (thinking on or off, effort).",
        "Keep the model and the options of the template for the length of a conversation.",
    ),
    "salt_or_tenant": Kind(
        "Another cache salt, whose purpose it is that nothing is shared.",
        "Use one salt for all requests that may share; leave it out where one tenant is alone.",
    ),
    "new_conversation": Kind(
        "Nothing earlier begins as this one does.", "Nothing: new text is computed once.", is_loss=False
    ),
    "evicted": Kind(
        "It was held once and had to make room.", "Give the store more dram or ssd, or pin what is worth it."
    ),
    "below_block_size": Kind(
        "What both share is shorter than a block, and only whole blocks are kept.",
        "Nothing, where prompts are short; put shared text first so that it fills a block.",
        is_loss=False,
    ),
    "below_minimum": Kind(
        "What both share is shorter than the server's minimum for its cache.",
        "Put shared text first so that it reaches the minimum, or run a server that has none.",
    ),
    "template_strips_thinking": Kind(
        "The model's chat template leaves out the thinking of earlier turns once a new user message comes.",
        "Use the template's own switch that keeps it, where it has one; otherwise it is lost by design.",
    ),
    "retokenised": Kind(
        "The text came back as it was generated, but its tokens are others: a text can be spelt in several ways.",
        "Nothing in the client; the transcript memory avoids it where it is on.",
    ),
    "rendering_changed": Kind(
        "The bodies continue each other, but their tokens do not: the template writes earlier turns otherwise later.",
        "Look at the template: what it prints must not depend on later messages.",
    ),
    "not_kept": Kind(
        "The server did not have what it had computed for the earlier request: evicted, kept by another replica, or it runs without a prefix cache.",
        "Switch its prefix cache on, give it more memory, or route a session to one replica.",
    ),
    "not_reported": Kind(
        "The server does not say how many tokens it reused.",
        "Have it report them (vLLM: --enable-prompt-tokens-details).",
        is_loss=False,
    ),
    "corrupt": Kind("It was held, but failed its check.", "Look at the disk; the copy is out of service."),
    "unavailable": Kind(
        "It was held, but its tier did not deliver.", "Look at the state of the tiers at /metrics."
    ),
    "expired": Kind("It was held, but not for long enough to be copied.", "Nothing: the store was closing."),
    "disabled": Kind(
        "Reuse is off for this request or process.", 'Leave out "workmem": {"reuse": false}.', is_loss=False
    ),
}
"""All causes. The names are public: in explanations, in metrics, in reports of lint."""


def cause(name: str, path: str, path_before: str, what: str, *, rule: str | None = None) -> Cause:
    """A cause of the kind `name`."""
    kind = KINDS[name]
    return Cause(name, path, path_before, what, kind.fix, kind.rule if rule is None else rule)
