"""What is trained beside pretraining: classifiers, and models of Hugging Face transformers."""
