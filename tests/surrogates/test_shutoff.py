"""The early shut-off: which rule closes it, what it logs, and what a checkpoint keeps."""

import logging
import math

import pytest
import torch

from splitveil.surrogates.shutoff import EarlyShutoff


def run(gate: EarlyShutoff, hard: float, soft: float, calls: int = 1) -> list[float]:
    """Loss 1.0 through the gate, `calls` times."""
    return [
        gate(torch.ones(()), torch.tensor(soft), torch.tensor(hard), torch.tensor(True))[0].item()
        for _ in range(calls)
    ]


def test_shutoff_golden_sequence_and_its_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Two early calls; open; EMA(hard) .4→.46→.514 > .5; back under; EMA(soft) past .6; back."""
    caplog.set_level(logging.INFO, "splitveil")
    gate = EarlyShutoff(2, 0.5, 0.6)
    assert run(gate, 0.4, 0.5, 3) == [0.0, 0.0, 1.0]
    assert run(gate, 1.0, 0.5, 2) == [1.0, 0.0]
    assert run(gate, 0.0, 0.5) == [1.0]
    assert run(gate, 0.0, 1.0, 3) == [1.0, 1.0, 0.0]
    assert run(gate, 0.0, 0.0) == [1.0]
    assert gate.calls.item() == 10
    assert gate.ema_soft.item() == pytest.approx(0.9 * (1 - 0.5 * 0.9**3))
    heads = [r.getMessage().split(",")[0] for r in caplog.records]
    assert heads == [
        "[CEM-GATE] call 1: SHUTOFF by early_shut_steps (hard gate mean 0.4000",
        "[CEM-GATE] call 3: OK (hard gate mean 0.4000",
        "[CEM-GATE] call 5: SHUTOFF by early_hard_thresh (hard gate mean 0.5140",
        "[CEM-GATE] call 6: OK (hard gate mean 0.4626",
        "[CEM-GATE] call 9: SHUTOFF by early_gate_thresh (hard gate mean 0.3372",
        "[CEM-GATE] call 10: OK (hard gate mean 0.3035",
    ]
    assert "soft 0.6355, limit 0.6" in caplog.records[4].getMessage()
    levels = [r.levelno for r in caplog.records]
    assert [i for i, level in enumerate(levels) if level == logging.WARNING] == [2, 4]


def test_shutoff_writes_every_200th_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "splitveil")
    run(EarlyShutoff(0, 0.5, 0.6), 0.1, 0.1, 401)
    calls = [r.getMessage().split(":")[0] for r in caplog.records]
    assert calls == [f"[CEM-GATE] call {n}" for n in (1, 200, 400)]


def test_shutoff_keeps_unread_lines_and_says_what_it_lost(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, where `report` is the loop's business: 70 lines, room for 64."""
    caplog.set_level(logging.INFO, "splitveil")
    gate = EarlyShutoff(0, 0.5, 0.6)
    with monkeypatch.context() as patch:
        patch.setattr(gate, "report", lambda: None)
        for i in range(70):
            gate.ema_hard.fill_(float(i % 2))
            run(gate, float(i % 2), 0.1)
    assert caplog.records == []
    gate.report()
    gate.report()
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 65
    assert messages[0] == "[CEM-GATE] 6 earlier lines were overwritten before they were read"
    assert messages[1].startswith("[CEM-GATE] call 7: OK")
    assert messages[-1].startswith("[CEM-GATE] call 70: SHUTOFF by early_hard_thresh")


def test_shutoff_state_survives_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    old, new = EarlyShutoff(2, 0.5, 0.6), EarlyShutoff(2, 0.5, 0.6)
    run(old, 0.4, 0.5, 3)
    new.load_state_dict(old.state_dict())
    caplog.set_level(logging.INFO, "splitveil")
    caplog.clear()
    assert run(new, 0.4, 0.5) == [1.0]
    assert new.calls.item() == 4
    assert caplog.records == []


def test_shutoff_ignores_calls_that_measure_nothing() -> None:
    gate = EarlyShutoff(0, 0.5, 0.6)
    one, nan = torch.ones(()), torch.tensor(math.nan)
    gate(one, one, one, torch.tensor(False))
    gate(one, nan, one, torch.tensor(True))
    assert (gate.calls.item(), gate.ema_soft.item(), gate.ema_hard.item()) == (0, 0.0, 0.0)
    assert run(gate, 0.1, 0.1) == [1.0]
