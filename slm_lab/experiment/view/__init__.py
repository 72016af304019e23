"""`slm-lab view`: a local web page that shows the runs in a data folder."""
