"""Pretrain a GPT model: ``torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 4 ...`` (or plain ``python`` for one process).

The same as ``megatron-sp pretrain gpt``. What is trained is in ``megatron_sp/tasks/gpt.py``: the model, its data and
its loss.
"""

from megatron_sp.commands.pretrain import pretrain_gpt

if __name__ == "__main__":
    pretrain_gpt()
