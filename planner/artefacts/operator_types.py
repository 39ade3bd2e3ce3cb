"""What is known of each operator type of ONNX, one row per type.

A new operator is one function in `operators/` and one row here. Functions stand by module and name
and are imported when they are asked for, because torch takes seconds to load. Operators of other
domains than ONNX's own stand under "domain.Type", as in `Operator.type`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from functools import lru_cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

Function = str | Callable[..., Any]


class Moves(StrEnum):
    """How outputs are made of elements of inputs, whose numbers do not change."""

    VIEW = auto()  # all of the first input, in its storage
    COPY = auto()  # those of the first input alone, in a new place or type
    PICK = auto()  # some of them, or of several inputs


class GroupedDims(StrEnum):
    """The dimensions that heads or groups may lie in."""

    DATA = auto()  # the last of three dimensions, or the second of four
    WEIGHTS = auto()  # those, and any of weights and biases
    CHANNELS = auto()  # the second, whatever the rank, and any of weights and biases


class Indices(NamedTuple):
    """An input that has indices.

    Attributes:
        position: of the input.
        table: position of the input that they point into.
        axis: the usual one that they point along; None where the last dimension has tuples of
            indices, or the other input is the number of classes.
    """

    position: int
    table: int
    axis: int | None = None


PRODUCTS = frozenset({"Gemm", "MatMul", "Conv", "ConvTranspose"})
"""Operators whose gradients of inputs and of parameters are products of their own."""
ATTENTION = frozenset(
    {"Attention", "com.microsoft.GroupQueryAttention", "com.microsoft.MultiHeadAttention"}
)
"""Operators that are attention without projections."""

VIEW, COPY, PICK = Moves
DATA, WEIGHTS, CHANNELS = GroupedDims


@dataclass(frozen=True, slots=True)
class OperatorType:
    """What is known of an operator type. The defaults hold for operators without a row.

    Attributes:
        function: computes it in torch: in `planner.operators`, such as "reduction.reduce_sum", in
            torch, such as "torch.abs", or one that the user has registered. Without one, the
            operator is refused, or replaced by ONNX's own definition of it.
        names: inputs and attributes in the order of the parameters of a function of torch that
            names them otherwise.
        refused: why it has no function.
        source: of a registered function, so that old measurements are not reused.
        shapes: in `planner.model.output_types`, or registered: gives the types of the outputs of an
            operator that ONNX does not define.
        onnx: the operator of ONNX that it is, under another name or before the version that brought
            it, with this version.
        fused: the operator of ONNX, with a version, that it is before an activation.
        keeps_shape: ONNX infers no shape; the output is like the first input.
        data_sized: the sizes of the outputs depend on numbers; they are no larger than the inputs.
        settings: positions of inputs that configure it, as an attribute would.
        no_gradient: positions of other float inputs that get no gradient.
        differentiable: an input may have a gradient.
        random: it draws random numbers.
        moves: its outputs have elements of its inputs.
        moved: positions of these inputs; () for all.
        saves_inputs: its backward pass reads inputs.
        bias: position of the bias of a product, which the backward pass does not read.
        states: positions of initial states.
        indices: the input that has indices.
        heads: attributes that count heads or groups; each is a multiple of those behind it.
        grouped: where the heads or groups lie.
        unit: attribute whose multiples are sizes of all inputs.
        limits: attributes that bound numbers -> a bound within standard normal numbers, beyond
            which the operator would look linear.
        windows: attributes that count neighbours.
        places: its floats are places in an image.
        flops: in `planner.model.flops`: counts the operations of its products.
    """

    function: Function | None = None
    names: str = ""
    refused: str = ""
    source: bytes = b""
    shapes: Function | None = None
    onnx: tuple[str, int] | None = None
    fused: tuple[str, int] | None = None
    keeps_shape: bool = False
    data_sized: bool = False
    settings: tuple[int, ...] = ()
    no_gradient: tuple[int, ...] = ()
    differentiable: bool = True
    random: bool = False
    moves: Moves | None = None
    moved: tuple[int, ...] = (0,)
    saves_inputs: bool = True
    bias: int | None = None
    states: tuple[int, ...] = ()
    indices: Indices | None = None
    heads: tuple[str, ...] = ()
    grouped: GroupedDims = DATA
    unit: str = ""
    limits: Mapping[str, float] = field(default_factory=dict)
    windows: tuple[str, ...] = ()
    places: bool = False
    flops: str = ""


_DATA = "the shape of its output depends on data; it is supported where its inputs are constants"
_INTEGERS = "products of integers have no gradient; train the model before it is quantized"
_TEXT = "it works on texts, which have no gradient; put it before the model"

OPERATOR_TYPES: dict[str, OperatorType] = {
    "Abs": OperatorType("torch.abs"),
    "Acos": OperatorType("torch.acos"),
    "Acosh": OperatorType("torch.acosh"),
    "Add": OperatorType("torch.add", saves_inputs=False),
    "AffineGrid": OperatorType("grids.affine_grid"),
    "And": OperatorType("torch.logical_and"),
    "ArgMax": OperatorType("reduction.arg_max", differentiable=False),
    "ArgMin": OperatorType("reduction.arg_min", differentiable=False),
    "Asin": OperatorType("torch.asin"),
    "Asinh": OperatorType("torch.asinh"),
    "Atan": OperatorType("torch.atan"),
    "Atanh": OperatorType("torch.atanh"),
    "Attention": OperatorType(
        "attention.attention",
        heads=("q_num_heads", "kv_num_heads"),
        windows=("left_window_size", "right_window_size"),
        flops="attention",
    ),
    "AveragePool": OperatorType("pooling.average_pool"),
    # Mean and variance are buffers.
    "BatchNormalization": OperatorType("normalization.batch_normalization", no_gradient=(3, 4)),
    "Bernoulli": OperatorType("sampling.bernoulli", differentiable=False, random=True),
    "BitCast": OperatorType("elementwise.bit_cast", differentiable=False),
    "BitShift": OperatorType("elementwise.bit_shift"),
    "BitwiseAnd": OperatorType("torch.bitwise_and"),
    "BitwiseNot": OperatorType("torch.bitwise_not"),
    "BitwiseOr": OperatorType("torch.bitwise_or"),
    "BitwiseXor": OperatorType("torch.bitwise_xor"),
    "BlackmanWindow": OperatorType("spectral.blackman_window"),
    "Cast": OperatorType("elementwise.cast", moves=COPY, saves_inputs=False),
    "CastLike": OperatorType("elementwise.cast_like", moves=COPY, no_gradient=(1,)),
    "CausalConvWithState": OperatorType("convolution.causal_conv_with_state", flops="conv"),
    "Ceil": OperatorType("torch.ceil", differentiable=False),
    "Celu": OperatorType("torch.nn.functional.celu", names="x alpha"),
    "CenterCropPad": OperatorType("shape.center_crop_pad"),
    "Clip": OperatorType("elementwise.clip", settings=(1, 2), limits={"min": -0.4, "max": 0.5}),
    "Col2Im": OperatorType("shape.col_to_im"),
    "Compress": OperatorType(refused=_DATA, data_sized=True),
    "Concat": OperatorType("shape.concat", moves=PICK, moved=(), saves_inputs=False),
    "Constant": OperatorType("shape.constant"),
    "ConstantOfShape": OperatorType("shape.constant_of_shape"),
    "Conv": OperatorType("convolution.conv", bias=2, heads=("group",), flops="conv"),
    "ConvInteger": OperatorType(refused=_INTEGERS),
    "ConvTranspose": OperatorType(
        "convolution.conv_transpose",
        bias=2,
        heads=("group",),
        grouped=CHANNELS,
        flops="conv_transpose",
    ),
    "Cos": OperatorType("torch.cos"),
    "Cosh": OperatorType("torch.cosh"),
    "CumProd": OperatorType("reduction.cum_prod"),
    "CumSum": OperatorType("reduction.cum_sum"),
    "DFT": OperatorType("spectral.dft"),
    "DeformConv": OperatorType("grids.deform_conv", flops="conv"),
    "DepthToSpace": OperatorType("shape.depth_to_space"),
    # Scales and zero points come from a calibration.
    "DequantizeLinear": OperatorType("quantization.dequantize_linear", no_gradient=(1, 2)),
    "Det": OperatorType("torch.det"),
    "Div": OperatorType("elementwise.div"),
    "Dropout": OperatorType("sampling.dropout", settings=(1, 2), random=True),
    "DynamicQuantizeLinear": OperatorType(differentiable=False),
    "Einsum": OperatorType("convolution.einsum", flops="einsum"),
    "Elu": OperatorType("torch.nn.functional.elu", names="x alpha"),
    "Equal": OperatorType("torch.eq"),
    "Erf": OperatorType("torch.erf"),
    "Exp": OperatorType("torch.exp"),
    "Expand": OperatorType("shape.expand", moves=COPY, saves_inputs=False),
    "EyeLike": OperatorType("shape.eye_like", differentiable=False, windows=("k",)),
    "Flatten": OperatorType("shape.flatten", moves=VIEW, saves_inputs=False),
    "Floor": OperatorType("torch.floor", differentiable=False),
    "GRU": OperatorType("recurrent.gru", states=(5,), unit="hidden_size", flops="recurrent"),
    "Gather": OperatorType(
        "indexing.gather", moves=PICK, saves_inputs=False, indices=Indices(1, 0, 0)
    ),
    "GatherElements": OperatorType(
        "indexing.gather_elements", moves=PICK, indices=Indices(1, 0, 0)
    ),
    "GatherND": OperatorType("indexing.gather_nd", moves=PICK, indices=Indices(1, 0)),
    "Gelu": OperatorType("elementwise.gelu"),
    "Gemm": OperatorType("convolution.gemm", bias=2, flops="gemm"),
    "GlobalAveragePool": OperatorType("pooling.global_average_pool"),
    "GlobalLpPool": OperatorType("pooling.global_lp_pool"),
    "GlobalMaxPool": OperatorType("pooling.global_max_pool"),
    "Greater": OperatorType("torch.gt"),
    "GreaterOrEqual": OperatorType("torch.ge", onnx=("GreaterOrEqual", 16)),
    "GridSample": OperatorType("grids.grid_sample"),
    "GroupNormalization": OperatorType(
        "normalization.group_normalization",
        keeps_shape=True,
        heads=("num_groups",),
        grouped=CHANNELS,
    ),
    "HammingWindow": OperatorType("spectral.hamming_window"),
    "HannWindow": OperatorType("spectral.hann_window"),
    "HardSigmoid": OperatorType("elementwise.hard_sigmoid"),
    "HardSwish": OperatorType("torch.nn.functional.hardswish", names="x"),
    "Hardmax": OperatorType("normalization.hardmax", differentiable=False),
    "Identity": OperatorType("shape.identity", moves=VIEW, saves_inputs=False),
    "ImageDecoder": OperatorType(refused="it reads a file format; decode images before the model"),
    "InstanceNormalization": OperatorType("normalization.instance_normalization"),
    "IsInf": OperatorType("elementwise.is_inf"),
    "IsNaN": OperatorType("torch.isnan"),
    "LRN": OperatorType("normalization.local_response_normalization"),
    "LSTM": OperatorType("recurrent.lstm", states=(5, 6), unit="hidden_size", flops="recurrent"),
    # ONNX Runtime writes it into models of any version.
    "LayerNormalization": OperatorType(
        "normalization.layer_normalization", onnx=("LayerNormalization", 17)
    ),
    "LeakyRelu": OperatorType("torch.nn.functional.leaky_relu", names="x alpha"),
    "Less": OperatorType("torch.lt"),
    "LessOrEqual": OperatorType("torch.le", onnx=("LessOrEqual", 16)),
    "LinearAttention": OperatorType(
        "attention.linear_attention", heads=("q_num_heads", "kv_num_heads")
    ),
    "Log": OperatorType("torch.log"),
    "LogSoftmax": OperatorType("normalization.log_softmax"),
    "LpNormalization": OperatorType("normalization.lp_normalization"),
    "LpPool": OperatorType("pooling.lp_pool"),
    "MatMul": OperatorType("torch.matmul", flops="matmul"),
    "MatMulInteger": OperatorType(refused=_INTEGERS),
    "Max": OperatorType("elementwise.maximum"),
    "MaxPool": OperatorType("pooling.max_pool"),
    "MaxRoiPool": OperatorType("grids.max_roi_pool", no_gradient=(1,), places=True),
    "MaxUnpool": OperatorType("pooling.max_unpool"),
    "Mean": OperatorType("elementwise.mean"),
    "MeanVarianceNormalization": OperatorType(
        "normalization.mean_variance_normalization", keeps_shape=True
    ),
    "MelWeightMatrix": OperatorType("spectral.mel_weight_matrix"),
    "Min": OperatorType("elementwise.minimum"),
    "Mish": OperatorType("torch.nn.functional.mish", names="x"),
    "Mod": OperatorType("elementwise.mod"),
    "Mul": OperatorType("torch.mul"),
    "Multinomial": OperatorType("sampling.multinomial", differentiable=False, random=True),
    "Neg": OperatorType("torch.neg"),
    # Weights of classes are not trained.
    "NegativeLogLikelihoodLoss": OperatorType(
        "losses.negative_log_likelihood_loss", no_gradient=(2,), indices=Indices(1, 0, 1)
    ),
    "NonMaxSuppression": OperatorType(refused=_DATA, data_sized=True),
    "NonZero": OperatorType(refused=_DATA, data_sized=True),
    "Not": OperatorType("torch.logical_not"),
    "OneHot": OperatorType("indexing.one_hot", indices=Indices(0, 1)),
    "Or": OperatorType("torch.logical_or"),
    "PRelu": OperatorType("elementwise.p_relu"),
    "Pad": OperatorType("shape.pad", moves=PICK, settings=(1, 2, 3)),
    "Pow": OperatorType("elementwise.power"),
    "QLinearConv": OperatorType(refused=_INTEGERS),
    "QLinearMatMul": OperatorType(refused=_INTEGERS),
    "QuantizeLinear": OperatorType("quantization.quantize_linear", differentiable=False),
    "RMSNormalization": OperatorType("normalization.rms_normalization"),
    "RNN": OperatorType("recurrent.rnn", states=(5,), unit="hidden_size", flops="recurrent"),
    "RandomNormal": OperatorType("sampling.random_normal", random=True),
    "RandomNormalLike": OperatorType("sampling.random_normal", no_gradient=(0,), random=True),
    "RandomUniform": OperatorType("sampling.random_uniform", random=True),
    "RandomUniformLike": OperatorType("sampling.random_uniform", no_gradient=(0,), random=True),
    "Range": OperatorType("shape.range_"),
    "Reciprocal": OperatorType("torch.reciprocal"),
    "ReduceL1": OperatorType("reduction.reduce_l1"),
    "ReduceL2": OperatorType("reduction.reduce_l2"),
    "ReduceLogSum": OperatorType("reduction.reduce_log_sum"),
    "ReduceLogSumExp": OperatorType("reduction.reduce_log_sum_exp"),
    "ReduceMax": OperatorType("reduction.reduce_max"),
    "ReduceMean": OperatorType("reduction.reduce_mean"),
    "ReduceMin": OperatorType("reduction.reduce_min"),
    "ReduceProd": OperatorType("reduction.reduce_prod"),
    "ReduceSum": OperatorType("reduction.reduce_sum"),
    "ReduceSumSquare": OperatorType("reduction.reduce_sum_square"),
    "RegexFullMatch": OperatorType(refused=_TEXT),
    "Relu": OperatorType("torch.relu"),
    "Reshape": OperatorType("shape.reshape", moves=VIEW, saves_inputs=False),
    "Resize": OperatorType("resizing.resize", settings=(1, 2, 3)),
    "ReverseSequence": OperatorType("indexing.reverse_sequence"),
    "RoiAlign": OperatorType(
        "grids.roi_align", no_gradient=(1,), indices=Indices(2, 0, 0), places=True
    ),
    "RotaryEmbedding": OperatorType(
        "attention.rotary_embedding", indices=Indices(3, 1, 0), heads=("num_heads",)
    ),
    "Round": OperatorType("torch.round", differentiable=False),
    "STFT": OperatorType("spectral.stft", no_gradient=(2,)),  # the window
    "Scatter": OperatorType(
        "indexing.scatter_elements", moves=PICK, moved=(0, 2), indices=Indices(1, 0, 0)
    ),
    "ScatterElements": OperatorType(
        "indexing.scatter_elements", moves=PICK, moved=(0, 2), indices=Indices(1, 0, 0)
    ),
    "ScatterND": OperatorType(
        "indexing.scatter_nd", moves=PICK, moved=(0, 2), indices=Indices(1, 0)
    ),
    "Selu": OperatorType("elementwise.selu"),
    "Shape": OperatorType("shape.shape", differentiable=False),
    "Shrink": OperatorType("elementwise.shrink", limits={"lambd": 0.4}),
    "Sigmoid": OperatorType("torch.sigmoid"),
    "Sign": OperatorType("torch.sign", differentiable=False),
    "SimplifiedLayerNormalization": OperatorType(
        "microsoft.simplified_layer_normalization", shapes="like_first"
    ),
    "Sin": OperatorType("torch.sin"),
    "Sinh": OperatorType("torch.sinh"),
    "Size": OperatorType("shape.size", differentiable=False),
    "Slice": OperatorType("shape.slice_", moves=COPY, saves_inputs=False),
    "Softmax": OperatorType("normalization.softmax"),
    # As of NegativeLogLikelihoodLoss.
    "SoftmaxCrossEntropyLoss": OperatorType(
        "losses.softmax_cross_entropy_loss", no_gradient=(2,), indices=Indices(1, 0, 1)
    ),
    "Softplus": OperatorType("elementwise.softplus"),
    "Softsign": OperatorType("torch.nn.functional.softsign", names="input"),
    "SpaceToDepth": OperatorType("shape.space_to_depth"),
    "Split": OperatorType("shape.split", moves=PICK, saves_inputs=False),
    "Sqrt": OperatorType("torch.sqrt"),
    "Squeeze": OperatorType("shape.squeeze", moves=VIEW, saves_inputs=False),
    "StringConcat": OperatorType(refused=_TEXT),
    "StringNormalizer": OperatorType(refused=_TEXT),
    "StringSplit": OperatorType(refused=_TEXT, data_sized=True),
    "Sub": OperatorType("torch.sub", saves_inputs=False),
    "Sum": OperatorType("elementwise.total"),
    "SwiGLU": OperatorType("elementwise.swi_glu"),
    "Swish": OperatorType("elementwise.swish"),
    "Tan": OperatorType("torch.tan"),
    "Tanh": OperatorType("torch.tanh"),
    "TensorScatter": OperatorType("indexing.tensor_scatter"),
    "TfIdfVectorizer": OperatorType(refused=_TEXT),
    "ThresholdedRelu": OperatorType("elementwise.thresholded_relu", limits={"alpha": 0.3}),
    "Tile": OperatorType("shape.tile", moves=COPY),
    "TopK": OperatorType("indexing.top_k"),
    "Transpose": OperatorType("shape.transpose", moves=VIEW, saves_inputs=False),
    "Trilu": OperatorType("shape.trilu", windows=("k",)),
    "Unique": OperatorType(refused=_DATA, data_sized=True),
    "Unsqueeze": OperatorType("shape.unsqueeze", moves=VIEW, saves_inputs=False),
    "Upsample": OperatorType("resizing.upsample", settings=(1,)),
    "Where": OperatorType("torch.where", moves=PICK, moved=(1, 2)),
    "Xor": OperatorType("torch.logical_xor"),
    "com.microsoft.Attention": OperatorType(
        "microsoft.attention",
        shapes="attention",
        heads=("num_heads",),
        grouped=WEIGHTS,
        flops="projecting_attention",
    ),
    "com.microsoft.BiasAdd": OperatorType("microsoft.bias_add", shapes="like_first"),
    "com.microsoft.BiasGelu": OperatorType("microsoft.bias_gelu", shapes="like_first"),
    "com.microsoft.BiasSplitGelu": OperatorType("microsoft.bias_split_gelu", shapes="half"),
    "com.microsoft.EmbedLayerNormalization": OperatorType(
        "microsoft.embed_layer_normalization", shapes="embedded"
    ),
    "com.microsoft.ExpandDims": OperatorType("microsoft.expand_dims", shapes="expanded"),
    "com.microsoft.FastGelu": OperatorType("microsoft.fast_gelu", shapes="like_first"),
    "com.microsoft.FusedConv": OperatorType(
        "microsoft.fused_conv", fused=("Conv", 11), heads=("group",), flops="conv"
    ),
    "com.microsoft.FusedGemm": OperatorType(
        "microsoft.fused_gemm", fused=("Gemm", 13), flops="gemm"
    ),
    "com.microsoft.FusedMatMul": OperatorType(
        "microsoft.fused_mat_mul", shapes="product", flops="fused_matmul"
    ),
    "com.microsoft.GatherND": OperatorType(
        "indexing.gather_nd", moves=PICK, onnx=("GatherND", 13), indices=Indices(1, 0)
    ),
    "com.microsoft.Gelu": OperatorType("torch.nn.functional.gelu", shapes="like_first"),
    "com.microsoft.GemmFastGelu": OperatorType(
        "microsoft.gemm_fast_gelu", shapes="product", flops="matmul"
    ),
    "com.microsoft.GridSample": OperatorType("grids.grid_sample", onnx=("GridSample", 16)),
    "com.microsoft.GroupNorm": OperatorType(
        "microsoft.group_norm", shapes="like_first", heads=("groups",), grouped=WEIGHTS
    ),
    # Cosines and sines are tables, not parameters.
    "com.microsoft.GroupQueryAttention": OperatorType(
        "microsoft.group_query_attention",
        shapes="group_query_attention",
        no_gradient=(7, 8),
        heads=("num_heads", "kv_num_heads"),
        windows=("local_window_size",),
        flops="group_query_attention",
    ),
    "com.microsoft.Inverse": OperatorType("torch.linalg.inv", shapes="like_first"),
    "com.microsoft.MultiHeadAttention": OperatorType(
        "microsoft.multi_head_attention",
        shapes="multi_head_attention",
        heads=("num_heads",),
        grouped=WEIGHTS,
        flops="multi_head_attention",
    ),
    "com.microsoft.Pad": OperatorType("shape.pad", moves=PICK, onnx=("Pad", 13), settings=(1, 2)),
    "com.microsoft.QuickGelu": OperatorType("microsoft.quick_gelu", shapes="like_first"),
    # Cosines and sines are tables, not parameters.
    "com.microsoft.RotaryEmbedding": OperatorType(
        "microsoft.rotary_embedding",
        shapes="like_first",
        no_gradient=(2, 3),
        indices=Indices(1, 2, 0),
        heads=("num_heads",),
    ),
    "com.microsoft.SkipGroupNorm": OperatorType(
        "microsoft.skip_group_norm", shapes="skipped", heads=("groups",), grouped=WEIGHTS
    ),
    "com.microsoft.SkipLayerNormalization": OperatorType(
        "microsoft.skip_layer_normalization", shapes="normalized"
    ),
    "com.microsoft.SkipSimplifiedLayerNormalization": OperatorType(
        "microsoft.skip_simplified_layer_normalization", shapes="normalized"
    ),
    "com.microsoft.TransposeMatMul": OperatorType(
        "microsoft.fused_mat_mul", shapes="product", flops="fused_matmul"
    ),
    "com.microsoft.Trilu": OperatorType("shape.trilu", onnx=("Trilu", 14), windows=("k",)),
    "planner.ByMode": OperatorType("running.by_mode", shapes="like_first", no_gradient=(1,)),
    "planner.NextState": OperatorType(
        "running.next_state", shapes="like_first", no_gradient=(0, 1)
    ),
}
"""Operator type -> what is known of it; `operators.register` adds rows."""

_UNKNOWN = OperatorType()


def facts(kind: str) -> OperatorType:
    """What is known of an operator type; the defaults where it has no row."""
    return OPERATOR_TYPES.get(kind, _UNKNOWN)


def function_of(kind: str) -> Callable[..., Any] | None:
    """The function that computes an operator; None if it has none."""
    function = facts(kind).function
    return None if function is None else imported(function, "planner.operators")


def imported(function: Function, module: str) -> Callable[..., Any]:
    """A function of a row.

    Args:
        function: itself, or its name.
        module: what names start from, except those of torch.
    """
    if not isinstance(function, str):
        return function
    return _resolved(function if function.startswith("torch.") else f"{module}.{function}")


@lru_cache(maxsize=1024)
def _resolved(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = resolve_name(name)
    return found


def registered() -> dict[str, bytes]:
    """The source of each operator that the user has registered, by its type, in order."""
    return {kind: row.source for kind, row in sorted(OPERATOR_TYPES.items()) if row.source}
