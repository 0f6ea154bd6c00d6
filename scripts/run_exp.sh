#!/bin/sh
# Seed 003's gated attention beside CEM: CIFAR-10, 240 epochs, λ = 16, attacker knows 90 % of test.
# Options go on to the command: scripts/run_exp.sh --seed 1 --data-dir DIR
exec "${SPLITVEIL:-splitveil}" reproduce seed-003 --only cem --only gated-att --only gated-att-simple \
    --only sparse+cem --only sparse+gated-att --only sparse+gated-att-simple "$@"
