"""Valid files in formats that people write."""

from collections.abc import Mapping

TOPOLOGIES: Mapping[str, str] = {
    "levels": """\
format: planner-topology/1
name: pair
device: T4
host: {cores: 4, memory: 64 GiB}
levels:
  - {name: gpu, count: 2, bandwidth: 10 GB/s, latency: 5 us}
  - {name: host, count: 2, bandwidth: 1 Gbps, latency: 50 us}
""",
    "cards": """\
format: planner-topology/1
name: two-cards
notes: ["figures by hand"]
hosts: [{name: host0, cores: 2, memory: 24 GiB}]
devices:
  - {name: gpu0, type: T4, host: host0}
  - {name: gpu1, type: MINE, host: host0}
switches: [pcie0]
links:
  - {name: x16, between: [gpu0, pcie0], bandwidth: 12 GB/s, latency: 5 us, sharing: exclusive}
  - {from: gpu1, to: pcie0, bandwidth: 6 GB/s, latency: 5 us}
  - {from: pcie0, to: gpu1, bandwidth: 12 GB/s, latency: 5 us}
device_types:
  MINE:
    memory: 24 GB
    flops: {float32: 20 TFLOP/s, float16: 80 TFLOP/s}
    memory_bandwidth: 600 GB/s
    source: "by hand"
tables:
  - groups: [[gpu0, gpu1]]
    times: {1 KB: 20 us, 1 MB: 90 us, 256 MB: 12 ms}
""",
    "templates": """\
format: planner-topology/1
name: uneven
templates:
  t4:
    hosts: [{name: host0}]
    devices: [{name: gpu, count: 2, type: T4, host: host0}]
    links: [{name: pcie, between: [gpu*, host0], bandwidth: 12 GB/s, latency: 5 us}]
hosts:
  - {template: p3-2xlarge, count: 2}
  - {template: t4}
switches: [network]
links:
  - {name: nic, between: [host*, network], bandwidth: 25 Gbps, latency: 12.5 us}
""",
    "extension": """\
format: planner-topology/1
name: my-p3
extends: p3-8xlarge
devices:
  - {name: gpu*, type: V100-SXM2-32GB}
  - {name: gpu8, type: T4, host: host0}
links:
  - {between: [gpu0, gpu1], bandwidth: 20 GB/s, latency: 1 us}
  - {between: [gpu8, host0], bandwidth: 10 GB/s, latency: 5 us}
""",
}
CLUSTERS: Mapping[str, str] = {
    "nvidia-smi": """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tmlx5_0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV1\tNV2\tSYS\tPIX\t0-19,40-59\t0
GPU1\tNV1\t X \tSYS\tNV2\tPIX\t0-19,40-59\t0
GPU2\tNV2\tSYS\t X \tPIX\tPHB\t20-39,60-79\t1
GPU3\tSYS\tNV2\tPIX\t X \tPHB\t20-39,60-79\t1
mlx5_0\tPIX\tPIX\tPHB\tPHB\t X \t

Legend:

  X    = Self
""",
    "astra-sim": """\
topology: [ Ring, FullyConnected, Switch ]  # the innermost first
npus_count: [ 3, 2, 2 ]
bandwidth: [ 200.0, 100, 50.0 ]  # GB/s
latency: [ 50.0, 500.0, 2000.0 ]  # ns
""",
    "hostfile": """\
# two unequal machines
worker-1 slots=4
worker-2 slots=2  # older
""",
}
CONFIG = """\
# half of what there is
steps: 2
optimizer: sgd
lr: 0.05
lr-schedule: linear:1:4
weight_decay: 1e-4
clip: 1.5
nan: skip
dtype: float32
loss: {y: auto}
device: cpu
threads: 1
seed: 7
shuffle: false
log: log.jsonl
"""
GRAPH_TXT = """\
node1 -- Input0 -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=16.0, \
parameter_size=0.0
node2 -- LSTM(8) -- forward_compute_time=1.0, backward_compute_time=2.0, \
activation_size=[8.0; 4.0; 4.0], parameter_size=64.0
node3 -- Linear(8, 2) -- forward_compute_time=0.5, backward_compute_time=1.5, activation_size=4.0, \
parameter_size=[40.0; 2.5] -- stage_id=0
node4 -- Add -- forward_compute_time=0.25, backward_compute_time=0.5, activation_size=4.0, \
parameter_size=0.0
node5 -- Linear(2, 2) -- forward_compute_time=1.5, backward_compute_time=2.5, activation_size=8.0, \
parameter_size=400.0
\tnode1 -- node2
\tnode2 -- node3
\tnode2 -- node4
\tnode3 -- node4
\tnode4 -- node5
"""
DNN_PARTITIONING = """\
{"maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 1000.0,
 "nodes": [
  {"id": 0, "name": "a", "fpgaLatency": 1.0, "cpuLatency": 9.0, "isBackwardNode": 0,
   "supportedOnFpga": 1, "size": 10.0, "colorClass": 0},
  {"id": 1, "name": "b", "fpgaLatency": 2.0, "cpuLatency": 9.0, "isBackwardNode": 0,
   "supportedOnFpga": 1, "size": 20.0, "colorClass": 1},
  {"id": 2, "name": "c", "fpgaLatency": 3.0, "cpuLatency": 9.0, "isBackwardNode": 0,
   "supportedOnFpga": 1, "size": 30.0},
  {"id": 3, "name": "b'", "fpgaLatency": 4.0, "cpuLatency": 9.0, "isBackwardNode": 1,
   "supportedOnFpga": 1, "size": 5.0, "colorClass": 1},
  {"id": 4, "name": "a'", "fpgaLatency": 2.0, "cpuLatency": 9.0, "isBackwardNode": 1,
   "supportedOnFpga": 1, "size": 5.0, "colorClass": 0}],
 "edges": [
  {"sourceId": 0, "destId": 1, "cost": 1.0, "size": 8.0},
  {"sourceId": 1, "destId": 2, "cost": 0.5, "size": 8.0},
  {"sourceId": 2, "destId": 3, "cost": 0.5, "size": 8.0},
  {"sourceId": 3, "destId": 4, "cost": 1.0, "size": 8.0}]}
"""
PIPER = """\
{"maxDevices": 4, "maxMemoryPerDevice": 1000.0, "bandwidth": 16.0, "mbsInBatch": 8,
 "nodes": [
  {"id": 0, "name": "first", "TMPCs": {"1": [
    {"id": "vanilla", "timePerSample": 2.0, "parameterSize": 8.0, "memoryUsageA": 4.0,
     "memoryUsageB": 9.0, "syncTimeFw": {}, "syncTimeBw": {"1": 0.0}},
    {"id": "activation recomp", "timePerSample": 3.0, "parameterSize": 8.0, "memoryUsageA": 1.0,
     "memoryUsageB": 9.0, "syncTimeFw": {}, "syncTimeBw": {"1": 0.0}}]}},
  {"id": 1, "name": "second", "TMPCs": {
   "1": [{"id": "vanilla", "timePerSample": 4.0, "parameterSize": 16.0, "memoryUsageA": 4.0,
     "memoryUsageB": 9.0, "syncTimeFw": {"0": 0.0}, "syncTimeBw": {"2": 0.0}}],
   "2": [{"id": "vanilla", "timePerSample": 2.5, "parameterSize": 8.0, "memoryUsageA": 2.0,
     "memoryUsageB": 5.0, "syncTimeFw": {"0": 8.0}, "syncTimeBw": {"2": 8.0}}]}},
  {"id": 2, "name": "third", "TMPCs": {"1": [
    {"id": "vanilla", "timePerSample": 1.0, "parameterSize": 8.0, "memoryUsageA": 4.0,
     "memoryUsageB": 9.0, "syncTimeFw": {"1": 0.0}, "syncTimeBw": {}}]}}],
 "edges": [
  {"sourceId": 0, "destId": 1, "communicationCost": 8.0},
  {"sourceId": 1, "destId": 2, "communicationCost": 8.0}]}
"""
