"""Scripts without Paceline train under --replace-ddp as with torch's DDP; the examples with it train."""

from __future__ import annotations

import re
import sys

import pytest

from tests.integrations.launched import (
    OURS,
    ROOT,
    TORCHS,
    accelerate_launch,
    assert_same_curve,
    ended,
    paceline_run,
    report_of,
    reports,
)

EXAMPLES = ROOT / "examples" / "trainers"


def without_paceline(name: str) -> str:
    """The text of an example without its lines of Paceline."""
    text = (EXAMPLES / name).read_text()
    text = re.sub(r"^(from|import) paceline.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *use_paceline\(.*\)\n", "", text, flags=re.MULTILINE)
    text = text.replace("use_paceline(Accelerator(cpu=True))", "Accelerator(cpu=True)")
    code = "\n".join(line.partition("#")[0] for line in text.partition("def main")[2].splitlines())
    assert "use_paceline" not in code
    return text


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("accelerate_digits.py", []),
        ("lightning_digits.py", ["--strategy", "ddp"]),
        ("transformers_gpt.py", []),
    ],
)
def test_a_script_runs_unchanged_with_replace_ddp(tmp_path, name, options):
    script = tmp_path / "script.py"
    script.write_text(without_paceline(name))
    found = []
    for number, option in enumerate(([], ["--replace-ddp"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = [*paceline_run(), *option, str(script), *options, "--epochs", "1", "--report", str(folder)]
        done = ended(command)
        assert done.returncode == 0, done.stdout + done.stderr
        said = done.stderr.count("paceline: replaced torch.nn.parallel.DistributedDataParallel")
        assert said == len(option), done.stderr
        assert "warning: no model was wrapped" not in done.stderr
        found.append([report_of(folder, rank) for rank in range(2)])
    for theirs, ours in zip(*found):
        assert (ours["wrapper"], theirs["wrapper"]) == (OURS, TORCHS)
        assert_same_curve(ours["losses"], theirs["losses"])


@pytest.mark.parametrize("name", ["accelerate_digits.py", "lightning_digits.py"])
def test_a_script_that_replaces_the_class_under_its_own_launcher(tmp_path, name):
    """`accelerate launch`, and Lightning's launcher, which starts the script a second time by itself."""
    first = "from __future__ import annotations\n"
    script = tmp_path / "script.py"
    script.write_text(
        without_paceline(name).replace(
            first, first + "import paceline.torch\npaceline.torch.replace_ddp()\n", 1
        )
    )
    command = [*accelerate_launch(), str(script)]
    if name.startswith("lightning"):
        command = [sys.executable, str(script), "--strategy", "ddp"]
    for report in reports(tmp_path, [*command, "--epochs", "1", "--report", str(tmp_path)]):
        assert report["wrapper"] == OURS
        assert report["losses"][-1] < 0.5 * report["losses"][0]


def test_use_paceline_under_replace_ddp(tmp_path):
    """Together they wrap the model once, in Paceline's class."""
    command = [*paceline_run(), "--replace-ddp", str(EXAMPLES / "accelerate_digits.py")]
    for report in reports(tmp_path, [*command, "--epochs", "1", "--report", str(tmp_path)]):
        assert report["wrapper"] == OURS
        assert report["losses"][-1] < 0.5 * report["losses"][0]


def test_the_ignite_example_trains(tmp_path):
    command = [*paceline_run(), str(EXAMPLES / "ignite_digits.py")]
    for report in reports(tmp_path, [*command, "--epochs", "1", "--report", str(tmp_path)]):
        assert report["wrapper"] == OURS
        assert report["losses"][-1] < 0.5 * report["losses"][0]


def test_the_example_that_resumes_goes_on_as_if_it_had_never_stopped(tmp_path):
    """torchdata's loader, torch's distributed checkpoint and a metric of torchmetrics in one script."""
    for report in reports(
        tmp_path, [*paceline_run(), str(EXAMPLES / "resume_digits.py"), "--report", str(tmp_path)]
    ):
        assert report["losses"] == report["whole"]  # bit by bit
        assert report["losses"][-1] < 0.5 * report["losses"][0]


@pytest.mark.parametrize("trainer", ["hapi", "fleet"])
def test_the_example_of_paddles_trainers_trains(tmp_path, trainer):
    command = [*paceline_run(), str(EXAMPLES / "paddle_digits.py"), "--trainer", trainer]
    for report in reports(tmp_path, [*command, "--epochs", "1", "--report", str(tmp_path)]):
        assert report["wrapper"] == "paceline.paddle.ddp.parallel"
        assert report["losses"][-1] < 0.5 * report["losses"][0]
