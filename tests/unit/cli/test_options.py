"""A mistake in the command line gives one line, with the word probably meant."""

import sys

import pytest
from paceline._cli import main, run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("doctorr", "doctorr is no command and no file: did you mean doctor?"),
        ("no_such", "no_such is no command and no file"),
        ("--versoin", "--versoin is no command and no file: did you mean --version?"),
        ("lanch x.py", "unknown word lanch: paceline run -n 2 script.py starts ranks"),
        ("train x.py", "unknown word train: paceline run -n 2 script.py starts ranks"),
        ("--sript x.py", "unknown option --sript"),
        ("run --sript x.py", "unknown option --sript"),
        ("run -n 2 --nope x.py", "unrecognized arguments: --nope"),
        (
            "run -n 2 -",
            "ranks cannot share the standard input: write the program to a file",
        ),
        ("run -n 2", "give a script or -m module"),
        ("run -n", "-n : give a number of ranks, or gpu for one per GPU"),
        ("top --interval abc", "argument --interval: abc: give 0.05 to 3600 seconds"),
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
