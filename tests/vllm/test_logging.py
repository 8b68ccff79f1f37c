"""What is said inside vLLM is said below vLLM's own logger: nobody sees what is outside it."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "workmem"
OUTSIDE = {"event_stream.py"}
"""Of the other end, `workmem index watch`."""


def loggers() -> dict[str, list[str]]:
    return {
        path.name: [
            ast.unparse(node.args[0])
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "getLogger"
        ]
        for folder in ("engines/vllm", "plugins")
        for path in (SOURCE / folder).glob("*.py")
        if path.name not in OUTSIDE
    }


def test_all_of_it_is_below_that_logger():
    found = {name: names for name, names in loggers().items() if names}
    assert {"guard.py", "offload_tier.py", "store_process.py", "vllm_store.py"} <= found.keys()
    assert {name for names in found.values() for name in names} == {"'vllm.workmem'"}
