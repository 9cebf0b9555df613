"""Training tasks: pretraining of GPT and BERT, fine-tuning of classifiers, external (Hugging Face) models."""
