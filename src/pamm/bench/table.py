"""Benchmark results as tables for the terminal."""

from rich import box
from rich.table import Table

from pamm.bench.records import Record
from pamm.report import format_bytes


def op_table(records: list[Record]) -> Table:
    """One line for each arm; ``exact / arm`` above 1 means faster than exact."""
    first = records[0]
    outputs = f"3 x {first['m']}" if first["layout"] == "separate" else f"{3 * first['m']} (fused)"
    table = _table(
        f"{first['tokens']:,} tokens, {first['n']} -> {outputs}, k = {first['k']}, "
        f"{first['dtype']}, {first['device']}",
        ("forward\nms", "backward\nms", "total\nms", "exact\n/ arm", "host\nms", "held"),
    )
    for record in records:
        table.add_row(
            record["arm"],
            *(f"{record[f'{phase}_ms']:.3f}" for phase in ("forward", "backward", "total")),
            _against_exact(records, record),
            f"{record['host_ms']:.3f}",
            format_bytes(record["held_bytes"]),
        )
    return table


def model_table(records: list[Record]) -> Table:
    """One line for each arm, with the memory that PAMM frees as a share of the X it takes."""
    first = records[0]
    mode = "torch.compile" if first["compiled"] else "eager"
    table = _table(
        f"LLaMA {first['model']}, {first['layers']} layers, {first['tokens']:,} tokens a step, "
        f"k = {first['k']}, {first['dtype']}, {mode}, {first['device']}",
        ("forward\nms", "backward\nms", "optimizer\nms", "tokens/s", "exact\n/ arm")
        + (("peak\nallocated", "X\nfreed") if "peak_allocated_bytes" in first else ()),
    )
    exact = next((record for record in records if record["arm"] == "exact"), None)
    for record in records:
        row = [
            record["arm"],
            *(f"{record[f'{phase}_ms']:.2f}" for phase in ("forward", "backward", "optimizer")),
            f"{record['tokens_per_s']:,.0f}",
            _against_exact(records, record),
        ]
        if "peak_allocated_bytes" in record:
            row.append(format_bytes(record["peak_allocated_bytes"]))
            freed = exact and exact["peak_allocated_bytes"] - record["peak_allocated_bytes"]
            row.append(f"{freed / record['x_bytes']:.1%}" if freed else "")
        table.add_row(*row)
    return table


def tune_table(title: str, records: list[Record]) -> Table:
    """What each kernel takes with its first tile and with the one chosen."""
    table = _table(title, ("default\nms", "chosen\nms", "chosen tile"), "kernel")
    for record in records:
        sizes = " ".join(f"{name}={value}" for name, value in record["tile"].items())
        times = (f"{record[f'{which}_ms']:.4f}" for which in ("default", "best"))
        table.add_row(record["kernel"], *times, sizes)
    return table


def breakdown_table(records: list[Record]) -> Table:
    """The paper's two tables in one."""
    first = records[0]
    table = _table(
        f"LLaMA {first['model']}, {first['layers']} layers, {first['arm']}: one step of "
        f"{first['iteration_ms']:.1f} ms on {first['device']}",
        ("pass", "ms", "of the\niteration", "of the\npass"),
        first_column="part",
    )
    for record in records:
        table.add_row(
            record["part"],
            record["pass"],
            f"{record['ms']:.3f}",
            f"{record['share_of_iteration']:.2%}",
            f"{record['share_of_pass']:.2%}",
            style="bold" if record["part"] == "total" else "",
        )
    return table


def _table(title: str, columns: tuple[str, ...], first_column: str = "arm") -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column(first_column, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _against_exact(records: list[Record], record: Record) -> str:
    exact = next((other for other in records if other["arm"] == "exact"), None)
    return f"{exact['total_ms'] / record['total_ms']:.3f}" if exact else ""
