"""GPT and BERT models and their heads, as lists of units."""
