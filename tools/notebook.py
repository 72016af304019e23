"""Execute docs/notebook.ipynb and save it with its outputs: python -m tools.notebook"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "notebook.ipynb"


def execute(folder: Path) -> nbformat.NotebookNode:
    """Return the notebook after its execution in `folder`. Raises CellExecutionError if a cell fails."""
    book = nbformat.read(NOTEBOOK, 4)
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return book


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        book = execute(Path(folder))
        for cell in book.cells:
            cell.metadata = {}
            if cell.cell_type == "code":
                cell.outputs = _tidy(cell.outputs, folder)
    nbformat.write(book, NOTEBOOK)


def _tidy(outputs: list[nbformat.NotebookNode], folder: str) -> list[nbformat.NotebookNode]:
    """Return the outputs without HTML and without the path of the folder. Consecutive lines of a stream are merged into one output."""
    tidy: list[nbformat.NotebookNode] = []
    for output in outputs:
        if "data" in output:
            output.data.pop("text/html", None)
            text = output.data["text/plain"] = output.data["text/plain"].replace(f"{folder}/", "")
            if output.output_type == "display_data" and list(output.data) == ["text/plain"]:
                output = nbformat.v4.new_output("stream", name="stdout", text=text)
        if tidy and output.output_type == tidy[-1].output_type == "stream":
            tidy[-1].text += output.text
        else:
            tidy.append(output)
    return tidy


if __name__ == "__main__":
    main()
