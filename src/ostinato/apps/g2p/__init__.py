"""Learn to pronounce English words: letters in, phonemes out.

The program shows `ostinato.rnn` and `ostinato.recurrent_net` on padded batches of words
of different lengths, and `ostinato.ragged.vmap` on the same words without padding:

    data.py        the dictionary, cleaned, and its split into train, dev and test words
    batches.py     batches of words of similar length, padded; or without padding
    model.py       the interface of a model: parameters, losses, a reader
    ctc.py         the CTC model: letters -> bidirectional LSTM -> phoneme scores
    ctc_search.py  greedy decoding and beam search over the scores of the CTC model
    attention.py   the attention model: the same encoder -> attention -> LSTM decoder
    beam.py        beam search for the decoder of the attention model
    alignment.py   which phonemes each letter of a word stands for
    ngram.py       an n-gram model of sequences
    joint.py       both: an n-gram model of words with their pronunciations
    ranking.py     the choice among the candidates of a search
    models.py      a table of both models by name
    metrics.py     edit distance, phoneme and word error rates
    settings.py    the settings of a run, with defaults that depend on its duration
    job.py         what a run needs to know: parameters, batches, error rates
    train.py       a run from the dictionary to the final error rates
    checkpoint.py  the file of a trained model
    report.py      error rates, alignments
    pronounce.py   the use of a trained model

What a run of any job does is in the folder above.
"""
