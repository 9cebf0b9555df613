"""Pretrain a BERT model: ``torchrun --nproc-per-node 2 pretrain_bert.py --num-layers 4 ...`` (or plain ``python`` for one process).

The same as ``megatron-sp pretrain bert``. What is trained is in ``megatron_sp/tasks/bert.py``: the model, its data and
its loss.
"""

from megatron_sp.commands.pretrain import pretrain_bert

if __name__ == "__main__":
    pretrain_bert()
