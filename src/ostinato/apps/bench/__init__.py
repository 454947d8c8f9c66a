"""Measure ostinato on this machine, next to the libraries that are installed.

The program is what `ostinato bench` runs; `python -m benchmarks.run`, the suite of the
repository, uses its problems, contenders and timing:

    problem.py   a problem: the network, the sizes, and the data for all contenders
    peers/       the contenders, one file each: ostinato itself and other libraries
    equality.py  the check that results agree
    timing.py    contenders take turns, so that a busy minute slows them all
    settings.py  the options of the command, checked
    session.py   a run: check, time, show, save
    results.py   the rows that were measured
    machine.py   the machine that they were measured on
    view.py      what a terminal shows
    picture.py   the picture
    page.py      the page, with the picture in it
"""
