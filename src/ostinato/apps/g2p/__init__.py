"""Learn to pronounce English words: letters in, phonemes out.

The program is an example of `ostinato.rnn` and `ostinato.recurrent_net` at work on
ragged data, padded, or with `ostinato.ragged.vmap` one word after another:

    data.py        the dictionary, clean words, held-out words
    batches.py     words of similar length together, few shapes; or without padding
    model.py       what every model has: parameters, a loss, that of one word, a reader
    ctc.py         letters -> bidirectional LSTM -> phoneme scores, CTC loss
    ctc_search.py  CTC's scores -> phonemes, greedy or by beam search
    ngram.py       how likely phoneme sequences are
    attention.py   the same encoder -> attention -> LSTM -> phoneme by phoneme
    beam.py        beam search over what a decoder writes
    models.py      both by name
    metrics.py     edit distance, phoneme and word error rates
    settings.py    what a run is told, and what it chooses by itself
    training.py    one update: gradient, AdamW, averaged weights
    run.py         the loop: clock, evaluations, best weights, resuming
    train.py       a run from the dictionary to the figures
    checkpoint.py  what a run leaves in its folder
    header.py      what it says there of itself, to be resumed
    fields.py      whether what a file says is of the declared types
    report.py      progress lines, figures, learning curve, alignments
    pronounce.py   a trained model at work
"""
