import torch

from splitveil.train.loop import epoch_order


def test_order_is_a_permutation_that_seed_and_epoch_decide() -> None:
    torch.manual_seed(0)
    first = epoch_order(1000, epoch=3, seed=7)
    torch.manual_seed(1)
    assert torch.equal(epoch_order(1000, epoch=3, seed=7), first)
    assert first.sort().values.tolist() == list(range(1000))
    assert not torch.equal(epoch_order(1000, epoch=4, seed=7), first)
    assert not torch.equal(epoch_order(1000, epoch=3, seed=8), first)


def test_order_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    assert epoch_order(0, epoch=0, seed=0).tolist() == []
    assert torch.equal(torch.get_rng_state(), before)
