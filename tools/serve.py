"""Serve a trained GPT over HTTP: the same as ``megatron-sp serve``."""

from door import enter

if __name__ == "__main__":
    enter("serve", "serve")
