"""Learn to pronounce English words: letters in, phonemes out.

The program is an example of `ostinato.rnn` at work on ragged data:

    data.py        the dictionary, clean words, held-out words
    batches.py     words of similar length together, few shapes
    model.py       letters -> bidirectional LSTM -> phoneme scores, CTC loss
    decode.py      scores -> phonemes, greedy or by beam search
    metrics.py     edit distance, phoneme and word error rates
    training.py    one update: gradient, AdamW, averaged weights
    train.py       the run: epochs, clock, best weights, interruption
    checkpoint.py  what a run leaves in its folder
    report.py      progress lines, figures, learning curve
    pronounce.py   a trained model at work
"""
