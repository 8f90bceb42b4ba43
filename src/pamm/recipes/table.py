"""A table as text, for pages and Markdown alike."""

import dataclasses


@dataclasses.dataclass
class Table:
    """Text in columns."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Its lines, without the title."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        return "".join(f"| {' | '.join(line)} |\n" for line in cells)
