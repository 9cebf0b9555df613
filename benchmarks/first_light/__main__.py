"""``python -m first_light``: what ``scripts/first_light.sh`` starts."""

from first_light.command import main
from megatron_sp.utils.entry_point import run_program

if __name__ == "__main__":
    run_program(main)
