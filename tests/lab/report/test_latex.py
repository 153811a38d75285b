"""What a comparison writes in LaTeX compiles."""

import subprocess
from pathlib import Path

import pytest

from lightfed.lab.compare import main as compare
from lightfed.lab.report.command import main
from tests.lab.report.make_run import ENVIRONMENT, METRICS, write_run

HARSH = r"[*] a_1 50 % & $x$ #{~^\} <|>"
# the rules of booktabs, which a small installation of LaTeX lacks
RULES = r"\let\toprule\hline\let\midrule\hline\let\bottomrule\hline"
DOCUMENT = r"\documentclass{article}" + RULES + r"\begin{document}%s\end{document}"


@pytest.mark.browser
def test_the_tables_of_a_comparison_compile(tmp_path: Path) -> None:
    """Also with names of runs and metrics that mean something to LaTeX."""
    runs = [
        write_run(
            tmp_path / f"run{seed}{name}",
            environment={**ENVIRONMENT, "name": name, "algorithm": name, "seed": seed},
            metrics={**METRICS, f"personal/{HARSH}": (0.1, "", 0.2)},
            config=None,
        )
        for name in ("FedAvg_1", "HeteroFL & 2 %")
        for seed in (0, 1)
    ]
    output = tmp_path / "out"
    assert compare([*map(str, runs), "--output", str(output), "--table", "latex"]) == 0
    assert main([str(runs[0]), "--table", "latex"]) == 0
    tables = [*output.glob("*.tex"), *(runs[0] / "report").glob("*.tex")]
    assert len(tables) >= 8
    inputs = "\n\n".join(rf"\input{{{table}}}" for table in tables if "clients" not in table.name)
    (tmp_path / "all.tex").write_text(DOCUMENT % inputs)
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "all.pdf").read_bytes().startswith(b"%PDF")
