"""Two processes that train one model, and data loaders whose workers solve."""

import os

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

import factormax.nn as fnn  # noqa: E402


class Model(nn.Module):
    """Aligns two sentences, selects of what is aligned, and adds it up."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.align = fnn.SequentialAlignment(0.4)
        self.score = nn.Linear(4, 1)
        self.select = fnn.ContiguousSelection(2, transition=0.3)
        self.output = nn.Linear(4, 1)

    def forward(self, source, target, source_lengths, target_lengths):
        lengths = source_lengths, target_lengths
        aligned = self.align(self.project(source) @ target.mT, lengths=lengths) @ target
        scores = self.score(aligned + source).squeeze(-1)
        weights = self.select(scores, lengths=source_lengths)
        return self.output((weights[..., None] * aligned).sum(dim=1)).squeeze(-1)


def make_model():
    torch.manual_seed(0)
    return Model().double()


def make_batch():
    """Eight pairs of sentences of different lengths, some longer on one side, some on the other."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randn(8, 4, 4, generator=generator, dtype=torch.float64)
    target = torch.randn(8, 5, 4, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([4, 2, 3, 4, 1, 4, 3, 2]), torch.tensor([5, 1, 3, 3, 5, 4, 2, 2])
    labels = torch.randn(8, generator=generator, dtype=torch.float64)
    return source, target, *lengths, labels


def train_step(model, batch):
    """One step; the gradients, and the parameters after it."""
    *inputs, labels = batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(*inputs) - labels).square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return grads, [p.detach().clone() for p in model.parameters()]


def worker(rank, folder):
    """One of two processes, with half of the batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        model = nn.parallel.DistributedDataParallel(make_model())
        half = [part[4 * rank : 4 * rank + 4] for part in make_batch()]
        torch.save(train_step(model, half), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()
    os._exit(0)  # one process in ten that trained with DDP, by any model, aborts in its clean-up


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_a_training_step_on_two_processes(tmp_path):
    torch.multiprocessing.spawn(worker, args=(str(tmp_path),), nprocs=2)
    expected = train_step(make_model(), make_batch())
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert all(grad.any() for grad in expected[0][:-2])  # the transitions learn too


class Trees(Dataset):
    """Each item is a sentence's tree, solved where it is loaded."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        n = 3 + index % 3
        return fnn.DependencyTree(valency=2)(torch.randn(n, n, generator=generator))


def select_rows(items):
    """Pads, and solves another layer for the whole batch."""
    lengths = torch.tensor([len(item) for item in items])
    batch = torch.zeros(len(items), 5, 5)
    for row, item in zip(batch, items, strict=True):
        row[: len(item), : len(item)] = item
    return batch, fnn.KSubset(2)(batch.diagonal(dim1=1, dim2=2), lengths=lengths)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader_solve(context):
    def load(**options):
        return list(DataLoader(Trees(), batch_size=4, collate_fn=select_rows, **options))

    expected = load()  # and so this process has used its threads before it forks
    found = load(num_workers=2, multiprocessing_context=context, timeout=60)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
