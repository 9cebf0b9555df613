"""How good a trained model is: perplexity, last words, multiple choice, masked tokens."""
