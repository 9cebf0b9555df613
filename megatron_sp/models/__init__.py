"""GPT, BERT and their heads, as lists of units."""
