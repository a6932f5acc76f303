"""A mistake in the command line gives one line, with the word probably meant."""

import sys

import pytest
from paceline._cli import main, run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("doctorr", "unknown word doctorr: did you mean doctor?"),
        ("--versoin", "unknown word --versoin: did you mean --version?"),
        ("--sript x.py", "unknown option --sript"),
        ("doctor --jsn", "unknown argument --jsn: did you mean --json?"),
        ("bench --quik", "unknown argument --quik: did you mean --quick?"),
        ("top --intervall=2", "unknown argument --intervall: did you mean --interval?"),
        ("top one two", "unknown argument one"),
        ("top --pid x", "argument --pid: invalid int value: 'x'"),
        ("trace --ouput x", "unknown argument --ouput: did you mean --output?"),
    ],
)
def test_a_mistake_is_one_line_with_what_was_meant(monkeypatch, capsys, words, message):
    monkeypatch.setattr(sys, "argv", ["/bin/paceline", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        main.main()
    command = words.partition(" ")[0]
    program = "paceline" + f" {command}" * (command in main._COMMANDS)
    shown = f"{program}: {message} ({program} --help says more)\n"
    assert capsys.readouterr() == ("", shown)


def test_a_script_that_is_called_almost_as_a_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchh").touch()
    started = []
    monkeypatch.setattr(run, "run", started.append)
    main._dispatch(["benchh", "x"])
    assert started == [["benchh", "x"]]
