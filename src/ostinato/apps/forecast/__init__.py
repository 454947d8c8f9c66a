"""Forecast the columns of a table of numbers with a date column.

table.py     reads a CSV file; missing values, parts of the rows
dates.py     dates in cells, and those of the rows that come next
model.py     the forecaster, a GRU over segments (SegRNN's idea)
windows.py   windows of look-back and horizon, standardised, in batches
settings.py  the settings of a run
job.py       what a run needs to know: parameters, batches, errors
train.py     a run from the file to the figures on its held-out end
report.py    a table of errors, a picture of forecasts
use.py       the file of a trained model, and forecasts with it

What a run of any job does is in the folder above.
"""
