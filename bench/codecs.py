"""How small pages of real KV become, how fast, and what rounding them does to the answer.

    python bench/codecs.py --model MODEL

Prompts of natural text are computed by the embedded engine's model, and every page is then put through

  - ways of compressing it exactly: zstandard's levels 1 and 3 and the settings that `zstd` uses, over whole
    pages and over byte planes in several orders (the measurement behind the choice);
  - the codecs as they are shipped, and sealing.

Rates are bytes of plain page per second of one thread's CPU time, median of the pages, so that a busy
machine does not decide them. Approximate codecs: errors of K and V, and the next-token distributions behind
a prompt whose pages were stored and restored, against the same with untouched pages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
import zstandard
from harness import RESULTS, Texts, environment, write_result
from rich.console import Console
from rich.table import Table

from workmem.config import cache_dir
from workmem.core.generation import GenerateRequest, SamplingParams
from workmem.core.layout import BLOCK_TOKENS, DTYPE_BYTES, KVLayout
from workmem.engines.embedded import attention
from workmem.engines.embedded.kv_pages import KVPages
from workmem.engines.embedded.loader import load
from workmem.engines.embedded.native import load_kernel
from workmem.engines.embedded.runner import PackedRunner
from workmem.engines.embedded.scheduler import Work
from workmem.engines.embedded.sequence import Sequence
from workmem.store.codecs import floats
from workmem.store.codecs.choose import codec_by_name
from workmem.store.codecs.contract import Codec
from workmem.store.codecs.sealing import PageCipher, PagePlace
from workmem.store.codecs.zstd import parameters, scratch, split

KEY = bytes(range(32))
STEPS = 16
"""Tokens of the text behind each prompt whose distributions are compared."""
PREFILL_TOKENS = 256
SAMPLED = 8
"""Every so many pages go through the ways that are only compared."""


class Sample(NamedTuple):
    """One way over some pages. Rates in MB/s, 0 where not measured."""

    way: str
    ratio: float
    encode: float
    decode: float


class Model:
    """The model in one dtype, with pages for one prompt."""

    def __init__(self, folder: Path, dtype: str, tokens: int) -> None:
        attention.register()
        loaded = load(folder, device="cpu", dtype=dtype, attn_implementation=attention.NAME)
        self.layout: KVLayout = loaded.layout
        self.pages = KVPages(loaded.layout, 1 + -(-(tokens + STEPS) // BLOCK_TOKENS), "cpu")
        self._runner = PackedRunner(loaded.model, self.pages, load_kernel(cache_dir()), "cpu")

    def run(self, tokens: list[int], start: int, cuts: range) -> list[torch.Tensor]:
        """Logits of the last token before each of `cuts`, the KV of `start` tokens taken from the pages as they are."""
        logits: list[torch.Tensor] = []
        with torch.inference_mode():
            for cut in cuts:
                request = GenerateRequest(id="x", token_ids=tokens[:cut], sampling=SamplingParams())
                seq = Sequence(
                    request, root=KEY, block_tokens=BLOCK_TOKENS, max_tokens=1, arrived=0.0, emit=print
                )
                seq.table = list(range(-(-cut // BLOCK_TOKENS)))
                seq.computed = start
                logits.append(self._runner.run([Work(seq, start, cut - start)])[0].clone().float())
                start = cut
        return logits


def rate(work: Callable[[], Any], size: int) -> float:
    """MB of page per second of this thread's CPU time, the better of two."""
    taken: list[float] = []
    for _ in range(2):
        start = time.thread_time()
        work()
        taken.append(time.thread_time() - start)
    return size / max(min(taken), 1e-9) / 1e6


def ways(payload: memoryview, layout: KVLayout) -> Iterator[tuple[str, list[bytes]]]:
    """The bytes that an exact way hands to the compressor, in pieces."""
    yield "page", [bytes(payload)]
    width = DTYPE_BYTES[layout.dtype]
    flat = np.frombuffer(payload, np.uint8).reshape(-1, width).T
    yield "planes", [plane.tobytes() for plane in flat]
    yield "planes, K before V", [plane.tobytes() for plane in split(payload, layout, scratch(layout))]
    shape = (layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    values = np.frombuffer(payload, f"<u{width}").reshape(shape)
    planes = [(values >> 8 * index).astype(np.uint8) for index in range(width)]
    yield "planes, channels outermost", [plane.transpose(0, 1, 3, 4, 2).tobytes() for plane in planes]
    yield (
        "planes, K by channel, V by head",
        [
            plane[:, 0].transpose(0, 2, 3, 1).tobytes() + plane[:, 1].transpose(0, 2, 1, 3).tobytes()
            for plane in planes
        ],
    )
    changed = values.copy()
    changed[:, :, 1:] ^= values[:, :, :-1]
    yield (
        "planes, xor with the token before",
        [(changed >> 8 * index).astype(np.uint8).tobytes() for index in range(width)],
    )
    changed = values.copy()
    changed[1:] ^= values[:-1]
    yield (
        "planes, xor with the layer before",
        [(changed >> 8 * index).astype(np.uint8).tobytes() for index in range(width)],
    )


def compare(pages: list[bytes], layout: KVLayout) -> list[Sample]:
    """All ways times all settings. The rates are the compressor's alone, without the splitting."""
    settings = {
        "level 1": zstandard.ZstdCompressor(level=1, write_checksum=False),
        "level 3": zstandard.ZstdCompressor(level=3, write_checksum=False),
        "entropy": zstandard.ZstdCompressor(compression_params=parameters()),
    }
    expand = zstandard.ZstdDecompressor()
    found: dict[str, list[tuple[int, float, float]]] = {}
    for page in pages[::SAMPLED]:
        for way, pieces in ways(memoryview(page), layout):
            for name, squeeze in settings.items():
                made = [squeeze.compress(piece) for piece in pieces]
                encode = rate(lambda s=squeeze, p=pieces: [s.compress(piece) for piece in p], len(page))
                decode = rate(lambda m=made: [expand.decompress(piece) for piece in m], len(page))
                found.setdefault(f"{way}, {name}", []).append((sum(map(len, made)), encode, decode))
    return [summed(way, rows, layout) for way, rows in found.items()]


def summed(way: str, rows: list[tuple[int, float, float]], layout: KVLayout) -> Sample:
    sizes, encode, decode = zip(*rows, strict=True)
    return Sample(
        way, layout.page_bytes * len(rows) / sum(sizes), statistics.median(encode), statistics.median(decode)
    )


def through(codec: Codec, pages: list[bytes], layout: KVLayout) -> tuple[Sample, list[bytes]]:
    """A codec as shipped over all pages, and what they come back as."""
    rows: list[tuple[int, float, float]] = []
    back: list[bytes] = []
    for page in pages:
        view, into = memoryview(page), bytearray(len(page))
        target = memoryview(into)
        made = codec.encode(view, key=KEY, layout=layout)
        stored = memoryview(page if made is None else made)
        used = codec_by_name("raw", "$") if made is None else codec
        encode = rate(lambda v=view: codec.encode(v, key=KEY, layout=layout), len(page))
        decode = rate(lambda u=used, s=stored, t=target: u.decode(s, t, key=KEY, layout=layout), len(page))
        if codec.exact and into != page:
            raise AssertionError(f"{codec.name} is not exact")
        rows.append((len(stored), encode, decode))
        back.append(bytes(into))
    return summed(f"codec {codec.name}", rows, layout), back


def references(pages: list[bytes], layout: KVLayout) -> list[Sample]:
    """What any way of moving a page costs: a copy, a checksum, and sealing on top."""
    cipher, size = PageCipher(os.urandom(32)), layout.page_bytes
    place = PagePlace(root=KEY, key=KEY, parent=KEY, depth=0, payload_bytes=size, stored_bytes=size, codec=0)
    rows: dict[str, list[tuple[int, float, float]]] = {}
    sealed, plain = memoryview(bytearray(size)), memoryview(bytearray(size))
    for page in pages:
        view = memoryview(page)
        rows.setdefault("copy", []).append(
            (size, rate(lambda v=view: plain.__setitem__(slice(None), v), size), 0)
        )
        rows.setdefault("xxh3-64", []).append(
            (size, rate(lambda v=view: xxhash.xxh3_64_intdigest(v), size), 0)
        )
        encode = rate(lambda v=view: cipher.seal(place, bytes(64), v, sealed), size)
        seal = cipher.seal(place, bytes(64), view, sealed)
        decode = rate(lambda s=seal: cipher.open_payload(place, s, sealed, plain), size)
        rows.setdefault("seal, open", []).append((size, encode, decode))
    return [summed(way, measured, layout) for way, measured in rows.items()]


def errors(pages: list[bytes], back: list[bytes], layout: KVLayout) -> dict[str, float]:
    """Largest and RMS error of K and of V, and RMS relative to the RMS of the values."""
    found: dict[str, float] = {}
    before = np.stack([floats.load(memoryview(page), layout) for page in pages])
    after = np.stack([floats.load(memoryview(page), layout) for page in back])
    for kind, name in enumerate("KV"):
        values = before[:, :, kind].astype(np.float64)
        off = after[:, :, kind] - values
        found[f"{name}_max"] = float(np.abs(off).max())
        found[f"{name}_rms"] = float(np.sqrt((off**2).mean()))
        found[f"{name}_rms_relative"] = found[f"{name}_rms"] / float(np.sqrt((values**2).mean()))
    return found


def divergence(exact: list[torch.Tensor], rounded: list[torch.Tensor]) -> dict[str, float]:
    """How far next-token distributions moved: KL in nats, share of the same first choice, largest logit change."""
    p, q = torch.stack(exact).log_softmax(-1), torch.stack(rounded).log_softmax(-1)
    return {
        "kl_mean": float((p.exp() * (p - q)).sum(-1).mean()),
        "first_choice_agrees": float((p.argmax(-1) == q.argmax(-1)).float().mean()),
        "logit_change_max": float((torch.stack(exact) - torch.stack(rounded)).abs().max()),
    }


def measure(folder: Path, dtype: str, prompts: list[list[int]], say: Callable[[str], None]) -> dict[str, Any]:
    """One dtype, all prompts."""
    size = len(prompts[0]) - STEPS
    model = Model(folder, dtype, size)
    layout, blocks = model.layout, size // BLOCK_TOKENS
    names = ("raw", "zstd", "int8", "fp8")
    pages: list[bytes] = []
    back: dict[str, list[bytes]] = {name: [] for name in names}
    rows: dict[str, list[Sample]] = {name: [] for name in names}
    moved: dict[str, list[dict[str, float]]] = {"int8": [], "fp8": []}
    for number, tokens in enumerate(prompts):
        say(f"{dtype}: prompt {number + 1} of {len(prompts)}")
        model.run(tokens[:size], 0, range(PREFILL_TOKENS, size + 1, PREFILL_TOKENS))
        mine = [model.pages.row(block).tobytes() for block in range(blocks)]
        exact = model.run(tokens, size, range(size + 1, len(tokens) + 1))
        for name in names:
            sample, restored = through(codec_by_name(name, "$"), mine, layout)
            rows[name].append(sample)
            back[name] += restored
            if name in moved:
                for block, page in enumerate(restored):
                    model.pages.row(block)[:] = np.frombuffer(page, np.uint8)
                rounded = model.run(tokens, size, range(size + 1, len(tokens) + 1))
                moved[name].append(divergence(exact, rounded))
        pages += mine
    say(f"{dtype}: ways to compress")
    samples = [*references(pages[::SAMPLED], layout), *compare(pages, layout)]
    samples += [average(rows[name]) for name in names]
    return {
        "dtype": dtype,
        "pages": len(pages),
        "page_bytes": layout.page_bytes,
        "samples": [sample._asdict() for sample in samples],
        "approximate": {
            name: {
                **errors(pages, back[name], layout),
                "kl_mean": statistics.mean(one["kl_mean"] for one in found),
                "first_choice_agrees": statistics.mean(one["first_choice_agrees"] for one in found),
                "logit_change_max": max(one["logit_change_max"] for one in found),
            }
            for name, found in moved.items()
        },
    }


def average(samples: list[Sample]) -> Sample:
    """Over prompts, each of the same number of pages."""
    return Sample(
        samples[0].way,
        statistics.harmonic_mean(sample.ratio for sample in samples),
        statistics.median(sample.encode for sample in samples),
        statistics.median(sample.decode for sample in samples),
    )


def show(console: Console, found: dict[str, Any]) -> None:
    table = Table(title=f"{found['dtype']}: {found['pages']} pages of {found['page_bytes']} bytes")
    for column in ("way", "plain / stored", "encode MB/s", "decode MB/s"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for row in found["samples"]:
        cells = [f"{row[name]:.0f}" if row[name] else "" for name in ("encode", "decode")]
        table.add_row(row["way"], f"{row['ratio']:.3f}", *cells)
    console.print(table)
    for name, values in found["approximate"].items():
        console.print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--workloads", type=Path, default=None, help="folder of more natural text")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument(
        "--tokens", type=int, default=1024, help=f"of each prompt, a multiple of {PREFILL_TOKENS}"
    )
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "codecs.json")
    options = parser.parse_args()
    if options.tokens % PREFILL_TOKENS:
        parser.error(f"--tokens must be a multiple of {PREFILL_TOKENS}, not {options.tokens}")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    texts = Texts(options.model, options.workloads, options.seed)
    prompts = [texts.prompt(options.tokens + STEPS) for _ in range(options.prompts)]
    console = Console()
    results: list[dict[str, Any]] = []
    for dtype in options.dtypes:
        results.append(measure(options.model, dtype, prompts, console.print))
        show(console, results[-1])
        write(options, results)


def write(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """The result file, with what there is so far."""
    body = {
        "bench": "codecs",
        "machine": environment(),
        "versions": {"zstandard": zstandard.__version__, "zstd": ".".join(map(str, zstandard.ZSTD_VERSION))},
        "prompts": options.prompts,
        "tokens": options.tokens,
        "seed": options.seed,
        "rows": results,
    }
    write_result(options.out, body)


if __name__ == "__main__":
    main()
