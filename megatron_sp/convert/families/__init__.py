"""Model families of Hugging Face: their config.json and tensor names, mapped to ours."""
