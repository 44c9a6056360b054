"""Long work says in a log how far it is."""

from saltus.cli import progress


def test_a_log_has_a_line_a_minute_and_only_of_work_that_takes_long(monkeypatch, capfd):
    seconds = iter([0.0, 59.0, 61.0, 61.0, 100.0])
    monkeypatch.setattr(progress, "monotonic", lambda: next(seconds))
    with progress.progress_meter(2000, "texts", in_logs=True) as show:
        for done in (10, 1000, 1010):
            show(done, "30 tokens/s")
    assert capfd.readouterr().err == "texts: 1,000 of 2,000, 30 tokens/s\n"
    for settings in ({"live": False, "in_logs": True}, {}):  # of a process that prints nothing; of short work
        with progress.progress_meter(2, "texts", **settings) as show:
            show(1)
    assert not capfd.readouterr().err
