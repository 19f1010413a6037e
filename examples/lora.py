"""Fine-tunes a small RoBERTa with PEFT's LoRA. The model comes from a configuration: nothing is downloaded.

    pip install peft transformers
    paceline run -n 2 examples/lora.py
    torchrun --nproc-per-node 2 examples/lora.py

What differs from the script for torch's DDP:

    - from torch.nn.parallel import DistributedDataParallel as DDP
    + from paceline.torch import DistributedDataParallel as DDP
"""

import argparse

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import RobertaConfig, RobertaForSequenceClassification

from paceline.torch import DistributedDataParallel as DDP


def synthetic_reviews(samples, seed, length=24):
    """Return token sequences; positive ones (1) have more tokens from the upper half of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (samples,), generator=generator)
    is_upper = torch.rand(samples, length, generator=generator) < 0.3 + 0.4 * labels[:, None]
    tokens = torch.randint(4, 52, (samples, length), generator=generator) + 48 * is_upper
    return TensorDataset(tokens, labels)


def build_model():
    """Return a small RoBERTa with random weights; for a checkpoint, use `from_pretrained` instead."""
    config = RobertaConfig(
        vocab_size=100,
        max_position_embeddings=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])
    return get_peft_model(RobertaForSequenceClassification(config), lora)


@torch.no_grad()
def accuracy(model, data):
    model.eval()
    tokens, labels = data.tensors
    correct = (model(input_ids=tokens).logits.argmax(1) == labels).float().mean().item()
    model.train()
    return correct


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=40, help="of all ranks together")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_data, test_data = synthetic_reviews(args.samples, seed=1), synthetic_reviews(500, seed=2)
    sampler = DistributedSampler(train_data)
    loader = DataLoader(train_data, args.batch_size // world_size, sampler=sampler, drop_last=True)
    model = build_model()
    if rank == 0:
        model.print_trainable_parameters()
    model = DDP(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for tokens, labels in loader:
            loss = model(input_ids=tokens, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            correct = accuracy(model.module, test_data)
            print(f"epoch {epoch}  loss {loss.item():.4f}  test accuracy {correct:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
