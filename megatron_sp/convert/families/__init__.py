"""Model families of Hugging Face: their config.json and the names of their tensors, in terms of ours."""
