"""Pictures of why a defence does what it does: pure functions of arrays and settings to PNG."""

from splitveil.explain.chart import flow_chart
from splitveil.explain.groups import gate_histogram, group_images, group_mass
from splitveil.explain.page import Panel, render, write_page
from splitveil.explain.spread import class_maps, class_variance, share_above, variance_against_noise
from splitveil.insight.pictures import attention_heatmap, sample_size_over_time, weighted_samples
from splitveil.report.flow_chart import Box, Flow, Sizes, run_flow

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
