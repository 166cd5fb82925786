"""A plan for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dtensor_compile.forecast.step_plan import StepMemory, StepPlan
from dtensor_compile.forecast.sweep import Swept
from dtensor_compile.report.compare_reports import seconds_text as seconds


def print_plan(plan: StepPlan, console: Console) -> None:
    """Prints memory, time and communication of a plan."""
    console.print(
        f"[bold]{plan.target}[/bold]: one training step of rank 0 of {plan.world} ({plan.mesh}), "
        f"{plan.gpu}, cluster {plan.cluster}; optimizer {plan.optimizer}"
        + (f", gradients clipped to {plan.clip:g}" if plan.clip else ""),
        highlight=False,
    )
    console.print(_verdict(plan.memory), highlight=False)
    console.print(_memory_table(plan.memory))
    console.print(_time_table(plan))
    console.print(_communication_table(plan))
    spill = f", {plan.spills} of them with spills" if plan.spills else ""
    console.print(f"{plan.graphs} graphs, {plan.breaks} breaks, {plan.kernels} Triton kernels{spill}", highlight=False)
    for line in plan.made_up:
        console.print(f"[yellow]reads a value, and gets 0[/yellow]: {line}", highlight=False)
    for basis in plan.rests_on:
        console.print(f"[dim]{basis}[/dim]", highlight=False)


def _verdict(memory: StepMemory) -> str:
    if memory.fits:
        return f"[green]fits[/green]: {size_text(memory.needed)} of {size_text(memory.capacity)}"
    advice = _ADVICE.get(_largest(memory)[0][1], "")
    return f"[red]does not fit[/red]: {why_not(memory)}" + (f". {advice}" if advice else "")


def why_not(memory: StepMemory) -> str:
    """The bytes by which a step does not fit, and the largest holders."""
    held = ", ".join(f"{kind} {size_text(bytes)}" for bytes, kind in _largest(memory)[:3] if bytes)
    too_much = size_text(memory.needed - memory.capacity)
    return f"{size_text(memory.needed)} of {size_text(memory.capacity)}, {too_much} too much; most of it: {held}"


def _largest(memory: StepMemory) -> list[tuple[int, str]]:
    return sorted(zip(memory.peak_of_kinds, memory.kinds), reverse=True)


def print_sweep(swept: Sequence[Swept], console: Console) -> None:
    """Prints plans in their order, and the best with the next best."""
    table = Table(title=f"{len(swept)} plans", title_justify="left")
    table.add_column("plan")
    for column in ("step", "tokens/s", "exposed", "of the peak"):
        table.add_column(column, justify="right")
    table.add_column("memory")
    for this in swept:
        name = text_of(this)
        if this.plan is None:
            table.add_row(name, "", "", "", "", f"failed: {this.failed}")
            continue
        plan = this.plan
        table.add_row(
            name,
            seconds(plan.time.step),
            f"{plan.tokens_per_second:,.0f}" if plan.tokens else "",
            f"{plan.time.exposed / plan.time.step:.0%}",
            f"{plan.model_flops_fraction:.0%}",
            f"{size_text(plan.memory.needed)} of {size_text(plan.memory.capacity)}"
            if plan.memory.fits
            else f"does not fit: {why_not(plan.memory)}",
            style="" if plan.memory.fits else "dim",
        )
    console.print(table)
    fitting = [this for this in swept if this.plan is not None and this.plan.memory.fits]
    if not fitting:
        console.print("none fits")
        return
    console.print(f"best: {text_of(fitting[0])}", highlight=False)
    if fitting[1:]:
        more = fitting[1].seconds / fitting[0].seconds - 1
        console.print(f"next best: {text_of(fitting[1])}, {more:.1%} slower", highlight=False)


def text_of(this: Swept) -> str:
    """``dp=64,tp=8 batch=2``"""
    dims = {name for name, _ in this.mesh}
    mesh = ",".join(f"{name}={size}" for name, size in this.mesh)
    return " ".join(filter(None, [mesh, *(f"{n}={v}" for n, v in this.settings.items() if n not in dims)]))


#: Advice by the kind that holds most of the memory.
_ADVICE = {
    "parameters": "Shard parameters over more ranks (fully_shard, or a larger tensor-parallel mesh dim).",
    "gradients": "Shard gradients over more ranks (fully_shard).",
    "optimizer states": "Shard optimizer states over more ranks (fully_shard), or take an optimizer with fewer.",
    "gathered parameters": "Wrap smaller modules in fully_shard, with reshard_after_forward=True.",
    "saved activations": "Checkpoint the blocks, take a smaller batch, or a larger tensor-parallel mesh dim.",
    "temporaries": "Take a smaller batch, or a sharded loss (loss_parallel) where logits are what is large.",
    "collectives": "Take a smaller batch, or smaller modules in fully_shard.",
}


def _memory_table(memory: StepMemory) -> Table:
    where = memory.peak_module or memory.peak_where or "compiled code"
    table = Table(title=f"memory at the peak, {size_text(memory.peak)} in {where}", title_justify="left")
    table.add_column("held by")
    table.add_column("bytes", justify="right")
    table.add_column("most of it", overflow="fold")
    for kind, bytes in sorted(zip(memory.kinds, memory.peak_of_kinds), key=lambda row: -row[1]):
        if bytes:
            first = next((h for h in memory.holders if h.kind == kind and h.where), None)
            line = f"{size_text(first.bytes)} {first.module or first.where}" if first is not None else ""
            table.add_row(kind, size_text(bytes), line)
    released = f"given back and made anew {memory.releases} times, to fit" if memory.releases else ""
    table.add_row("segments of the allocator", size_text(memory.reserved), released, style="dim")
    table.add_row("workspaces of libraries", size_text(memory.fixed), "", style="dim")
    return table


def _time_table(plan: StepPlan) -> Table:
    time = plan.time
    table = Table(title=f"step {seconds(time.step)} ± {seconds(plan.step_error)}", title_justify="left")
    table.add_column("of it")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, value in (
        ("compute", time.compute),
        ("exposed communication", time.exposed),
        ("idle, waiting for the host", time.idle),
    ):
        table.add_row(name, seconds(value), f"{value / time.step:.0%}" if time.step else "")
    table.add_section()
    for name, value in (("forward", time.forward), ("backward", time.backward), ("optimizer", time.rest)):
        table.add_row(name, seconds(value), f"{value / time.step:.0%}" if time.step else "")
    table.add_section()
    table.add_row("hidden communication", seconds(time.hidden), "")
    table.add_row("model FLOPs, of the peak", f"{plan.model_flops:.3g}", f"{plan.model_flops_fraction:.0%}")
    if plan.tokens:
        table.add_row("tokens of the job", f"{plan.tokens:,}", f"{plan.tokens_per_second:,.0f} a second")
        table.add_row("", "", f"{plan.tokens_per_second * 86400:.3g} a day")
    return table


def _communication_table(plan: StepPlan) -> Table:
    table = Table(title="communication of a step", title_justify="left")
    for column in ("mesh dim", "kind", "count", "bytes", "seconds", "exposed"):
        table.add_column(column, justify="left" if column in ("mesh dim", "kind") else "right")
    for row in plan.communication:
        table.add_row(
            row.mesh_dim,
            row.kind,
            str(row.count),
            size_text(row.bytes),
            seconds(row.seconds),
            seconds(row.exposed_seconds),
        )
    return table


def size_text(number: int) -> str:
    """``1.50 GiB``, ``20.0 MiB``, ``12 KiB``"""
    if number >= 1 << 30:
        return f"{number / (1 << 30):.2f} GiB"
    return f"{number / (1 << 20):.1f} MiB" if number >= 1 << 20 else f"{number / 1024:.0f} KiB"
