#!/bin/sh
# Slots against CEM: CIFAR-10, 240 epochs, λ = 16, attacker knows 90 % of test.
# Options go on to the command: scripts/run_exp1.sh --seed 1 --data-dir DIR
exec "${SPLITVEIL:-splitveil}" reproduce gated-att-report --only cem --only slot-cross \
    --only sparse+cem --only sparse+slot-cross "$@"
