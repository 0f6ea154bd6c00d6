#!/bin/sh
# Gated attention against CEM: CIFAR-10, 240 epochs, λ = 16, attacker knows 90 % of test.
# Options go on to the command: scripts/run_exp.sh --seed 1 --data-dir DIR
exec "${SPLITVEIL:-splitveil}" reproduce gated-att-report --only cem --only gated-att --only gated-att-simple \
    --only sparse+cem --only sparse+gated-att --only sparse+gated-att-simple "$@"
