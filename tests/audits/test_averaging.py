"""A device that averages its answer with the server's: the audit judges what it reports."""

import torch
from torch import nn

from splitveil.audits.target import Target
from splitveil.audits.trained_run import exit_of
from splitveil.nets.channel import Channel
from splitveil.nets.clients import build_client, parse_client
from splitveil.nets.exit import Exit, Policy, TappedClient, body_and_projection, own_head
from splitveil.nets.split import SplitModel
from splitveil.threat import Labelled

IMAGE = (1, 8, 8)


def test_the_audit_sees_the_answers_that_the_device_reports() -> None:
    torch.manual_seed(0)
    body, projection = body_and_projection(build_client(parse_client("strided-8-8x2.16-c4"), IMAGE))
    rule = Exit(own_head(body, IMAGE, 3), 3, policy=Policy(send=1.0), average=True)
    with torch.no_grad():
        rule.head.get_parameter("2.bias")[2] += 9.0  # so that its answer differs from the server's
    client = TappedClient(body, projection, len(body))
    server = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    model = SplitModel(client, Channel(), server, rule).eval()
    images, labels = torch.rand(60, *IMAGE), torch.arange(60) % 3
    scored, aux = Labelled(images[:30], labels[:30]), Labelled(images[30:], labels[30:])
    device = exit_of(model, scored, aux)
    target = Target(
        victim=model.victim(), head=model.head, classes=("a", "b", "c"), aux=aux, scored=scored,
        exit=device,
    )  # fmt: skip
    answered, asked = model.answer(scored.images)
    assert bool(asked.all())
    assert torch.equal(target.if_asked, answered.argmax(1))
    server_alone = model(scored.images).argmax(1)
    assert torch.equal(target.sent.answer, server_alone)
    assert not torch.equal(target.if_asked, server_alone)
