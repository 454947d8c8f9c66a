"""Jobs that learn from data, each in a folder of its own, and what they share.

Common to all:

    job.py         the interface of a job: what a run needs to know about it
    session.py     a run from its settings to its figures: new, resumed, interrupted
    run.py         the training loop: clock, evaluations, best weights, checkpoints
    devices.py     the devices and processes that share batches
    training.py    one update of the parameters
    memory.py      the memory of the process between updates
    settings.py    the settings that every run has, and those of a run to resume
    header.py      the header of the file that a run is resumed from
    tensors.py     files of arrays, read with suspicion
    fields.py      checks of what files say
    files.py       writing that cannot tear
    report.py      evaluations as CSV, learning curves, tables
    display.py     live progress
    errors.py      the error for problems that the user can fix

A job's own, in `g2p`, `forecast` and `music`: data, model, loss, evaluation, and what
its report shows. `bench` measures speed and trains nothing.
"""
