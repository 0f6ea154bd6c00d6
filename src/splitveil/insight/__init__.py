"""Pictures of why a defence does what it does: pure functions of arrays and settings to PNG."""

from splitveil.insight.explanation import Panel, render, write_page
from splitveil.insight.pictures import (
    attention_heatmap,
    class_maps,
    class_variance,
    gate_histogram,
    group_images,
    group_mass,
    sample_size_over_time,
    share_above,
    variance_against_noise,
    weighted_samples,
)
from splitveil.report.flow_chart import Box, Flow, Sizes, flow_chart, run_flow

__all__ = [
    "Box",
    "Flow",
    "Panel",
    "Sizes",
    "attention_heatmap",
    "class_maps",
    "class_variance",
    "flow_chart",
    "gate_histogram",
    "group_images",
    "group_mass",
    "render",
    "run_flow",
    "sample_size_over_time",
    "share_above",
    "variance_against_noise",
    "weighted_samples",
    "write_page",
]
