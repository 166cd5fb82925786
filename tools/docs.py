"""Writes the files of docs/ that are made from the code: report.schema.json, causes.md, options.md, patches.md and
steps.md.

python tools/docs.py            (a test fails while they are out of date: --check names those that are)
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pathlib
import pkgutil
import re
import sys

from dtensor_compile import compat
from dtensor_compile.compat.patches import FEATURES, Feature, Hook, Patch
from dtensor_compile.graph.runner import GraphStep
from dtensor_compile.options import PASS_NAMES, Options
from dtensor_compile.report.cause_pages import causes_page
from dtensor_compile.report.model import schema
from dtensor_compile.stages import joint, lowered, program

DOCS = pathlib.Path(__file__).parent.parent / "docs"


def pages() -> dict[str, str]:
    """File name -> text of every page that is made."""
    return {
        "report.schema.json": json.dumps(schema(), indent=2) + "\n",
        "causes.md": causes_page(),
        "options.md": options_page(),
        "patches.md": patches_page(),
        "steps.md": steps_page(),
    }


# ---- options.md ----------------------------------------------------------------------------------------------------

_OPTIONS = """# Options

`torch.compile(..., backend="dtensor", options={...})`. An unknown key or a wrong value is an error that names what is
allowed. Every key of `torch._inductor.config` is accepted too, and `mode=` means what it means for Inductor. Two of
these keys are on here so that numbers are eager's: `emulate_precision_casts` (roundings to bfloat16 that the program
asks for happen) and `fallback_random` (dropout and other random values are eager's for the same seed);
`options={"fallback_random": False}` trades that for fused kernels. `tools/docs.py` makes this page of the class
`Options`.

"""
_ASKED = """## Passes that have to be asked for

- `reduce_in_narrow_dtype` rounds more than another order of additions does.
- `sequence_parallel` takes on trust that plain inputs of a graph, and numbers in it, are the same on all ranks of a
  mesh ([concepts](concepts.md)).
- `exchange_rows` sends the rows of a table in shards that ranks look up (an embedding under FSDP) in place of the
  table, forward and backward, where that is fewer bytes. It takes on trust that all ranks look up as many rows in each
  call.
- `decompose_matmuls` divides a matmul beside an `all_gather` or a `reduce_scatter` into parts, so that one part
  travels while another is computed, where the estimate of `topology` says that it pays: more collectives, each
  smaller; even shards only. For groups with symmetric memory it puts torch's fused operators in their place.
- `bucket_collectives`, named here, sends small collectives of one kind as one also where the program does not group
  them. That happens by itself on CPUs, and where `topology` names a network, whose latency says what pays. What one
  `fully_shard` wraps and the buckets of DDP are sent as one in any case, or in parts that each take 160 times as long
  to send as to start, where others can then start sooner.
"""


def options_page() -> str:
    """All options with their defaults, as the docstring of `Options` explains them."""
    explained = _attributes(inspect.getdoc(Options) or "")
    parts = [_option(option, explained[option.name]) for option in dataclasses.fields(Options) if option.init]
    return _OPTIONS + "".join(parts) + _ASKED


def _option(option: dataclasses.Field[object], text: str) -> str:
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    if option.name in PASS_NAMES:
        text += " " + ", ".join(f"`{name}`" for name in PASS_NAMES[option.name]) + " ([steps](steps.md))."
    default = (
        ""
        if option.default is dataclasses.MISSING
        else f" Default: `{json.dumps(option.default) if isinstance(option.default, str) else option.default}`."
    )
    return f"## `{option.name}`\n\n{text}{default}\n\n"


def _attributes(doc: str) -> dict[str, str]:
    """Name -> text of the attributes in a docstring."""
    _, _, listed = doc.partition("Attributes:\n")
    entries = re.split(r"^ {4}(\w+): ", listed, flags=re.M)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}


# ---- patches.md ----------------------------------------------------------------------------------------------------

_PATCHES = """# What is replaced in torch

This backend has to replace or call functions of torch that have no public name. This page lists all of them, by what
they are for; `tools/docs.py` makes it of the table in the code (`dtensor_compile/compat/patches.py`). A patch holds
while this backend compiles, on the thread that compiles, and is undone at the end; four are marked *lasting*, and hand
over to torch where another backend compiles. Parameters are those that we rely on: where a release has others, or has
no such function, the feature is missing, with one warning that names it, and the rest works. A feature is *essential*
where numbers could be wrong without it: to use it is an error then.

"""


def patches_page() -> str:
    """All features with what they replace and call of torch."""
    for module in pkgutil.walk_packages(compat.__path__, f"{compat.__name__}."):
        importlib.import_module(module.name)
    features = sorted(FEATURES.values(), key=lambda of: of.name.lower())
    patched = [of for of in features if any(isinstance(hook, Patch) for hook in of.hooks)]
    count = sum(isinstance(hook, Patch) for of in patched for hook in of.hooks)
    summary = f"{count} functions, methods and tables are replaced, for {len(patched)} features.\n\n"
    called = "## Called, and not replaced\n\n| feature | of torch | without it |\n|---|---|---|\n" + "".join(
        f"| {of.name} | {', '.join(f'`{hook.place}`' for hook in of.hooks)} | {of.without} |\n"
        for of in features
        if of not in patched
    )
    return _PATCHES + summary + "".join(map(_feature, patched)) + called


def _feature(of: Feature) -> str:
    place, sentence = of.scope
    lines = [f"## {of.name[:1].upper()}{of.name[1:]}", ""]
    if sentence:
        lines += [f"`{place}`: {sentence}", ""]
    lines += [
        f"- Without it {of.without}." + (" **Essential.**" if of.essential else ""),
        f"- Upstream: {_linked(of.upstream)}.",
        f"- Can go when {of.remove_when}.",
        "",
        "| of torch | parameters relied on | |",
        "|---|---|---|",
        *map(_row, of.hooks),
        "",
        "",
    ]
    return "\n".join(lines)


def _row(hook: Hook) -> str:
    kind = ("lasting" if hook.lasting else "replaced") if isinstance(hook, Patch) else "called"
    takes = " or ".join(f"`({', '.join(text.split())})`" for text in hook.takes)
    return f"| `{hook.place}` | {takes} | {kind} |"


def _linked(text: str) -> str:
    """Numbers of issues and pull requests, of pytorch/pytorch where no repository stands before one, as links."""

    def link(found: re.Match[str]) -> str:
        return f"[{found[0]}](https://github.com/{found[1] or 'pytorch/pytorch'}/issues/{found[2]})"

    return re.sub(r"([\w-]+/[\w-]+)?#(\d+)", link, text)


# ---- steps.md ------------------------------------------------------------------------------------------------------

_STEPS = """# The pipeline, step by step

What this backend does to a program, in order (`dtensor_compile/stages`); `tools/docs.py` makes this page of the lists
in the code. A step that is *required* is one that numbers depend on: its error ends the compilation. Any other that
fails is taken back, with a warning and a decision, and the rest goes on; `options={"strict": True}` makes an error of
it. Decisions in the report carry the name of the step. `options={"disable_passes": (...)}` leaves passes out by name.

"""
_LISTS = (
    ("The graph of torch functions over DTensors, as Dynamo gives it: always", program.ALWAYS),
    ("The same, where a graph is compiled and not run as it is", program.CAPTURED),
    ("The joint graph of forward and backward over local tensors: redistributions", joint.PLAN),
    ("The joint graph: copies, and what is kept for the backward pass", joint.SHAPE),
    ("The forward graph and the backward graph: from redistributions to collectives", lowered.LOWER),
    ("Collectives beside compute", lowered.SCHEDULE),
    ("What the code that runs is made of", lowered.FINISH),
)


def steps_page() -> str:
    """All steps on graphs, list by list."""
    return _STEPS + "\n".join(f"## {title}\n\n{_steps(steps)}" for title, steps in _LISTS)


def _steps(steps: tuple[GraphStep, ...]) -> str:
    rows = ["| step | | what it does |", "|---|---|---|"]
    for step in steps:
        kinds = ("required", step.required), ("where it is asked for", step.asked), ("changes no node", step.reads)
        sentence = " ".join((step.run.__doc__ or "").partition("\n\n")[0].split())
        kind = ", ".join(kind for kind, holds in kinds if holds)
        rows.append(f"| `{step.name}` | {kind} | {sentence} |")
    return "\n".join([*rows, ""])


if __name__ == "__main__":
    found = pages()
    if "--check" in sys.argv:
        print("\n".join(name for name, text in found.items() if (DOCS / name).read_text() != text))
    else:
        for name, text in found.items():
            (DOCS / name).write_text(text)
