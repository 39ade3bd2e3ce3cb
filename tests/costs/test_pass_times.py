"""Passes on two streams, beside figures that follow by hand and a plain queue of its own."""

import random
from dataclasses import replace

import pytest

from planner.costs.local_stage import local_stage
from planner.costs.pass_times import SideDurations, backward_times, forward_times
from planner.costs.stage_pass import stage_pass
from planner.resharding.overlap import pass_order, sends
