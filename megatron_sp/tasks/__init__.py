"""Training tasks: pretraining of GPT and BERT, fine-tuning of classifiers, training of external (Hugging Face) models."""
