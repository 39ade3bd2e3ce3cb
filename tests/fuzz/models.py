"""Small ONNX models of every kind that the planner reads, in ONNX's text form. Inputs called w..
become weights; all tensors are small enough for a case to take milliseconds.
"""

from collections.abc import Mapping
from zlib import crc32

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, numpy_helper, parser

HEAD = '<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1, "own" : 1]>'
TEXTS: Mapping[str, str] = {
    "mlp": """g (float[N,8] x, float[8,8] w1, float[8] wb1, float[8,8] w2, float[8,4] w3)
        => (float[N,4] y) {
        a = Gemm(x, w1, wb1)  b = Relu(a)  c = MatMul(b, w2)  d = Gelu(c)  y = MatMul(d, w3) }""",
    "cnn": """g (float[N,3,8,8] x, float[4,3,3,3] w1, float[4] ws, float[4] wb, float[4] wm,
        float[4] wv, float[4,4,3,3] w2, float[4,4] w3) => (float[N,4] y) {
        a = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w1)
        b = BatchNormalization(a, ws, wb, wm, wv)
        c = Relu(b)
        d = MaxPool<kernel_shape=[2,2]>(c)
        e = ConvTranspose<strides=[1,1]>(d, w2)
        f = AveragePool<kernel_shape=[3,3], ceil_mode=1>(e)
        h = GlobalAveragePool(f)
        i = Flatten(h)
        y = Gemm<transB=1>(i, w3) }""",
    "attention": """g (int64[N,T] tokens, float[16,8] we, float[8] ws, float[8] wb, float[8,24] wq,
        float[8,16] wo) => (float[N,T,16] y) {
        a = Gather(we, tokens)
        b = LayerNormalization(a, ws, wb)
        q = MatMul(b, wq)
        three = Constant<value_int=3>()
        q1, q2, q3 = Split<axis=-1, num_outputs=3>(q)
        t = Transpose<perm=[0,2,1]>(q2)
        s = MatMul(q1, t)
        half = Constant<value_float=0.35>()
        m = Mul(s, half)
        p = Softmax(m)
        o = MatMul(p, q3)
        shape = Shape(tokens)
        tail = Constant<value_ints=[8]>()
        to = Concat<axis=0>(shape, tail)
        r = Reshape(o, to)
        u = Add(r, a)
        y = MatMul(u, wo) }""",
    "branches": """g (float[2,4] x, float[4,4] w1, float[4,4] w2) => (float[2,4] y) {
        a = MatMul(x, w1)
        yes = Constant<value_int=1>()
        is = Cast<to=9>(yes)
        b = If(is) <then_branch = t () => (float[2,4] p) { p = Relu(a) },
                    else_branch = e () => (float[2,4] q) { q = Neg(a) }>
        y = MatMul(b, w2) }""",
    "loops": """g (float[2,4] x, float[4,4] w1) => (float[2,4] y, float[3,2,4] all) {
        three = Constant<value_int=3>()
        yes = Constant<value_int=1>()
        go = Cast<to=9>(yes)
        y, all = Loop(three, go, x) <body = b (int64 i, bool c, float[2,4] s)
            => (bool d, float[2,4] t, float[2,4] u) {
            d = Identity(c)  m = MatMul(s, w1)  t = Relu(m)  u = Identity(t) }> }""",
    "scans": """g (float[2,4] x, float[3,2,4] rows, float[4,4] w1)
        => (float[2,4] y, float[3,2,4] z) {
        a = MatMul(x, w1)
        y, z = Scan(a, rows) <num_scan_inputs=1, body = b (float[2,4] s, float[2,4] r)
            => (float[2,4] t, float[2,4] u) { t = Add(s, r)  u = Tanh(t) }> }""",
    "sequences": """g (float[4,6] x, float[6,6] w1) => (float[4,6] y) {
        a = MatMul(x, w1)
        n = Constant<value_ints=[2,2]>()
        s = SplitToSequence<axis=0>(a, n)
        zero = Constant<value_int=0>()
        b = SequenceAt(s, zero)
        t = SequenceInsert(s, b)
        u = SequenceErase(t, zero)
        o = Optional(u)
        v = OptionalGetElement(o)
        y = ConcatFromSequence<axis=0>(v) }""",
    "functions": """g (float[2,4] x, float[4,4] w1, float[4] wb) => (float[2,4] y) {
        a = own.linear(x, w1, wb)
        y = own.twice<factor=2.0>(a) }
        <domain: "own", opset_import: ["" : 20, "own" : 1]>
        linear (x, w, b) => (y) { m = MatMul(x, w)  y = Add(m, b) }
        <domain: "own", opset_import: ["" : 20, "own" : 1]>
        twice <factor> (x) => (y) {
            f = Constant<value_float: float = @factor>()
            m = Mul(x, f)
            y = Relu(m) }""",
    "recurrent": """g (float[3,2,4] x, float[1,16,4] w1, float[1,16,4] w2, float[1,32] wb,
        float[1,12,4] w3, float[1,12,4] w4) => (float[3,1,2,4] y, float[3,1,2,4] z) {
        a, h, c = LSTM<hidden_size=4>(x, w1, w2, wb)
        axes = Constant<value_ints=[1]>()
        s = Squeeze(a, axes)
        z, k = GRU<hidden_size=4>(s, w3, w4)
        y = Identity(a) }""",
    "images": """g (float[1,2,6,6] x, float[2,2,3,3] w1, float[1,5,5,2] grid)
        => (float[?,?,?,?] y) {
        a = Conv<group=1, dilations=[1,1], auto_pad="SAME_UPPER">(x, w1)
        pads = Constant<value_ints=[0,0,1,1,0,0,1,1]>()
        b = Pad<mode="reflect">(a, pads)
        sizes = Constant<value_ints=[1,2,10,10]>()
        c = Resize<mode="linear">(b, , , sizes)
        d = GridSample<mode="linear">(c, grid)
        e = InstanceNormalization(d, one, nil)
        starts = Constant<value_ints=[1,1]>()
        ends = Constant<value_ints=[4,-1]>()
        axes = Constant<value_ints=[2,3]>()
        f = Slice(e, starts, ends, axes)
        h = DepthToSpace<blocksize=1>(f)
        y = LpPool<kernel_shape=[2,2], p=2>(h) }""",
    "picking": """g (float[4,6] x, float[6,6] w1) => (float[?] y, int64[?] i) {
        a = MatMul(x, w1)
        k = Constant<value_ints=[3]>()
        v, i2 = TopK(a, k)
        at = Constant<value_ints=[1]>()
        b = Gather<axis=1>(v, at)
        two = Constant<value_ints=[4,2]>()
        e = Expand(b, two)
        zeros = ConstantOfShape(two)
        c = Add(e, zeros)
        d = GatherElements<axis=1>(v, i2m)
        f = Concat<axis=1>(c, d)
        n = NonZero(f)
        o = Einsum<equation="ij,kj->ik">(f, f)
        axis = Constant<value_ints=[1]>()
        s = ReduceSum<keepdims=0>(o, axis)
        r = CumSum(s, nought)
        i = ArgMax<axis=0, keepdims=0>(o)
        y = Softplus(r) }""",
    "losses": """g (float[4,6] x, int64[4] labels, float[6,5] w1) => (float loss) {
        a = MatMul(x, w1)
        ratio = Constant<value_float=0.5>()
        mode = Constant<value_int=1>()
        train = Cast<to=9>(mode)
        b = Dropout(a, ratio, train)
        c = LogSoftmax(b)
        loss = NegativeLogLikelihoodLoss<reduction="mean">(c, labels) }""",
    "quantized": """g (float[2,4] x, float[4,4] w1) => (float[2,4] y) {
        s = Constant<value_float=0.1>()
        a = QuantizeLinear(x, s)
        b = DequantizeLinear(a, s)
        c = MatMul(b, w1)
        h = Cast<to=10>(c)
        f = Cast<to=1>(h)
        d = com.microsoft.Gelu(f)
        e = Clip(d, nil0, s)
        y = Where(mask, e, d) }""",
}
# Constants that the texts name, of other types than weights.
CONSTANTS: Mapping[str, np.ndarray] = {
    "one": np.ones(2, np.float32),
    "nil": np.zeros(2, np.float32),
    "nil0": np.float32(-1.0) * np.ones((), np.float32),
    "i2m": np.zeros((4, 2), np.int64),
    "nought": np.zeros((), np.int64),
    "mask": np.array([[True, False, True, False]]),
}
BATCH: Mapping[str, tuple[str, ...]] = {
    "mlp": ("--batch", "2"), "cnn": ("--batch", "2"),
    "attention": ("--batch", "2", "--dim", "T=3"),
}  # fmt: skip
"""Options that bind the symbolic dimensions."""


def model(name: str) -> ModelProto:
    """One of the models."""
    proto = parser.parse_model(f"{HEAD} {TEXTS[name]}")
    graph = proto.graph
    weights = [value for value in graph.input if value.name.startswith("w")]
    inputs = [value for value in graph.input if not value.name.startswith("w")]
    del graph.input[:]
    graph.input.extend(inputs)
    graph.initializer.extend(_weight(value) for value in weights)
    read = {tensor for node in graph.node for tensor in node.input}
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), tensor)
        for tensor, value in CONSTANTS.items()
        if tensor in read
    )
    return proto


def _weight(value: onnx.ValueInfoProto) -> TensorProto:
    """Random numbers, the same each time; variances are above 0."""
    random = np.random.default_rng(crc32(value.name.encode()))
    shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    numbers = random.uniform(0.1, 0.9, shape).astype(np.float32)
    return numpy_helper.from_array(numbers, value.name)


def outside(proto: ModelProto, file: str) -> bytes:
    """Puts the weights of a model beside it, and returns the content of that file."""
    data = b""
    for tensor in proto.graph.initializer:
        raw = numpy_helper.to_array(tensor).tobytes()
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        entries = (("location", file), ("offset", len(data)), ("length", len(raw)))
        for key, value in entries:
            tensor.external_data.add(key=key, value=str(value))
        data += raw
    return data
