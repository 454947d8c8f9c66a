"""Learn from piano rolls and MIDI files which notes come next, and write new pieces.

rolls.py       piano rolls: which keys sound in each frame; transposed, dealt out
read.py        files of music of every kind as pieces, in three parts
midi.py        MIDI files: read and written
mat_script.py  a script that reads `.mat` files in a process of its own
unpickle.py    pickles, read without running what they name
model.py       the model of the next frame: a recurrent network, chords
settings.py    the settings of a run
job.py         what a run needs to know: parameters, batches, likelihoods
train.py       a run from the files to the likelihood of held-out pieces
report.py      a table of likelihoods, a picture of rolls
use.py         the file of a trained model, and pieces drawn from it

What a run of any job does is in the folder above.
"""
