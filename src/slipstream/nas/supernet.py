"""A model that runs any of its sub-networks on shared weights, and exports them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from slipstream.errors import InvalidArgumentError
from slipstream.nas.coupling import FACTORIES, RECURRENT, VIEWS, Labels, argument
from slipstream.nas.space import ArchitectureSpace, Kernel, Width
from slipstream.nas.trace import op_name, owner_of, shape_of
from slipstream.search import Candidate
from slipstream.units import with_article

_aten = torch.ops.aten


class Supernet(nn.Module):
    """All architectures of a space on one set of weights.

    The weights are those of the space, a copy of the model's. `configure` selects the sub-network
    that `forward` runs: slices of the weights, without skipped blocks. At first it is the whole
    model. ``state_dict()`` includes the order in which units are removed. In training mode batch
    norms use the statistics of the batch, since those of one width are wrong for another; see
    `calibrate`.

    Args:
        space: result of `derive_space`.

    Raises:
        InvalidArgumentError: `space` is something else, such as the model.
    """

    def __init__(self, space: ArchitectureSpace) -> None:
        super().__init__()
        if not isinstance(space, ArchitectureSpace):
            raise InvalidArgumentError(
                "space", f"{with_article(type(space).__name__)} is not an ArchitectureSpace",
                remedy="pass the result of ss.nas.derive_space(model, inputs)",
            )  # fmt: skip
        self.space = space
        self.net = nn.Module()
        for name in dict.fromkeys(str(n.target) for n in self.nodes if n.op == "get_attr"):
            attach(self.net, name, attrgetter(name)(space.module))
        self._config = space.full
        self.rank()
        self.eval()

    @property
    def nodes(self) -> list[Node]:
        """The operators of the whole model, in order."""
        return list(self.space.module.graph.nodes)

    @property
    def config(self) -> dict[str, int]:
        """The current configuration."""
        return dict(self._config)

    def configure(self, config: Mapping[str, Any] | Candidate) -> Supernet:
        """Select a sub-network; names that are left out have their largest choice.

        Raises:
            InvalidArgumentError: a value is not one of its choices.
            UnknownNameError: a name is not a parameter of the space.
        """
        self._config = self.space.checked(config)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set the mode of dropout and batch norm."""
        self.training = mode
        return self

    def rank(self) -> None:
        """Order the units of each width by the current L1 norm of their weights."""
        self.order = self._importance()

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """Return the order of units for ``state_dict``."""
        return {name: torch.from_numpy(order) for name, order in self.order.items()}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the order of units.

        Raises:
            InvalidArgumentError: the state is that of another space.
        """
        if {n: len(o) for n, o in state.items()} != {n: len(o) for n, o in self.order.items()}:
            raise InvalidArgumentError(
                "state_dict", "it is that of another architecture space",
                remedy="derive the space from the same model with the same options",
            )  # fmt: skip
        self.order = {name: order.cpu().numpy() for name, order in state.items()}

    def _importance(self) -> dict[str, Labels]:
        """Return the units of each width, in descending order of the L1 norm of their weights."""
        coupling = self.space.coupling
        score = np.zeros(len(coupling.raw) + 1)
        for name, axes in coupling.parameters.items():
            tensor = self.tensor(name)
            if not tensor.is_floating_point() or tensor.dim() < 2:
                continue
            for axis, labels in enumerate(axes):
                if labels is not None:
                    others = [d for d in range(tensor.dim()) if d != axis]
                    norm = tensor.detach().abs().double().sum(others).cpu().numpy()
                    np.add.at(score, coupling.raw[labels], norm / max(norm.sum(), 1e-30))
        return {
            name: np.argsort(-score[choice.components], kind="stable")
            for name, choice in self.space.choices.items()
            if isinstance(choice, Width)
        }

    def tensor(self, name: str) -> torch.Tensor:
        """Return the whole parameter or buffer with this qualified name."""
        tensor: torch.Tensor = attrgetter(name)(self.net)
        return tensor

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Run the configured sub-network.

        Raises:
            InvalidArgumentError: the model takes another number of tensors, or tensors of other
                shapes.
        """
        self._check(inputs)
        *_, (_, output) = self.run(inputs)
        return output

    def run(self, inputs: Sequence[torch.Tensor]) -> Iterator[tuple[Node, Any]]:
        """Yield the operators of the configured sub-network with their results, in order."""
        subnet = Subnet(self, self._config)
        values: dict[Node, Any] = {}
        remaining = iter(inputs)
        for node in self.nodes:
            if node in subnet.unused:
                continue
            if node.op == "placeholder":
                values[node] = next(remaining)
            elif node.op == "get_attr":
                values[node] = subnet.tensor(node)
            elif node.op == "output":
                values[node] = torch.fx.map_arg(node.args[0], values.__getitem__)
            elif node in subnet.skipped:
                values[node] = values[subnet.skipped[node]]
            else:
                target, args, kwargs = subnet.call(node, self.training)
                args, kwargs = torch.fx.map_arg((args, kwargs), values.__getitem__)
                values[node] = target(*args, **kwargs)
            yield node, values[node]

    def _check(self, inputs: Sequence[Any]) -> None:
        """Compare inputs with the traced ones, whose variable sizes are symbols."""
        expected = [node.meta["val"] for node in self.nodes if node.op == "placeholder"]
        if len(inputs) != len(expected):
            raise InvalidArgumentError(
                "inputs", f"got {len(inputs)}, but the model takes {len(expected)}"
            )
        for x, traced in zip(inputs, expected, strict=True):
            if not isinstance(x, torch.Tensor):
                kind = with_article(type(x).__name__)
                raise InvalidArgumentError("inputs", f"{kind} is not a tensor")
            sizes = [n if isinstance(n, int) else None for n in traced.shape]
            if len(sizes) != x.dim() or any(
                n is not None and n != size for n, size in zip(sizes, x.shape, strict=True)
            ):
                shape = ", ".join("batch" if n is None else str(n) for n in sizes)
                raise InvalidArgumentError(
                    "inputs", f"shape {list(x.shape)} is not [{shape}]",
                    remedy="derive the space from inputs of the shape that the model is run on",
                )  # fmt: skip
            if x.is_floating_point() != traced.is_floating_point():
                raise InvalidArgumentError("inputs", f"got {x.dtype} instead of {traced.dtype}")

    def export(self, config: Mapping[str, Any] | Candidate | None = None) -> GraphModule:
        """Return a sub-network as a plain module with copies of its weights, in eval mode.

        Parameters and layers have the names they had in the model.

        Args:
            config: configuration; None for the current one.
        """
        chosen = self._config if config is None else self.space.checked(config)
        return Subnet(self, chosen).module()


def need_supernet(net: object, where: str | None = None) -> Supernet:
    """Return `net`.

    Raises:
        InvalidArgumentError: it is something else, such as the model.
    """
    if not isinstance(net, Supernet):
        kind = with_article(type(net).__name__)
        raise InvalidArgumentError(
            "net", f"{kind} is not a Supernet", where=where, remedy="use ss.nas.Supernet(space)"
        )
    return net


class Subnet:
    """One configuration of a supernet: which positions, operators and arguments it retains.

    Attributes:
        skipped: sums of skipped blocks, with the operand that replaces them.
        unused: nodes that only skipped blocks need.
    """

    def __init__(self, net: Supernet, config: Mapping[str, int]) -> None:
        self.net = net
        coupling = net.space.coupling
        removed = np.zeros(int(coupling.raw.max(initial=-1)) + 1, bool)
        self.kernels: dict[str, int] = {}
        self.skipped: dict[Node, Node] = {}
        for name, choice in net.space.choices.items():
            if isinstance(choice, Width):
                removed[choice.components[net.order[name][config[name] :]]] = True
            elif isinstance(choice, Kernel):
                self.kernels[choice.weight] = config[name]
            else:
                for _, sums in choice.blocks[config[name] :]:
                    self.skipped.update(dict(sums))
        self._retained = ~removed[coupling.raw]
        self.unused = self._unused() if self.skipped else set[Node]()
        self._tensors: dict[str, torch.Tensor] = {}

    def _unused(self) -> set[Node]:
        needed: set[Node] = set()
        for node in reversed(self.net.nodes):
            if node.op in ("output", "placeholder") or node in needed:
                needed.add(node)
                shortcut = self.skipped.get(node)
                needed.update([shortcut] if shortcut is not None else node.all_input_nodes)
        return set(self.net.nodes) - needed

    def runs(self, node: Node) -> bool:
        """Whether this sub-network calls the operator of `node`."""
        return node.op == "call_function" and node not in self.unused and node not in self.skipped

    def count(self, labels: Labels | None, size: int) -> int:
        """Return the number of retained positions of an axis of `size`."""
        return size if labels is None else int(self._retained[labels].sum())

    def shape(self, node: Node) -> tuple[int, ...]:
        """Return the shape of a tensor; the batch is that of the example inputs."""
        axes = self.net.space.coupling.axes[node]
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            sizes = shape_of(value)
        else:
            sizes = tuple(self.net.tensor(str(node.target)).shape)
        found = [self.count(a, n) for a, n in zip(axes, sizes, strict=True)]
        if node.op == "get_attr" and (kernel := self.kernels.get(str(node.target))):
            found[2:] = [kernel] * (len(found) - 2)
        return tuple(found)

    def tensor(self, node: Node) -> torch.Tensor:
        """Return the retained part of a parameter or buffer; the tensor itself if it is whole."""
        name = str(node.target)
        if name in self._tensors:
            return self._tensors[name]
        tensor = self.net.tensor(name)
        for axis, labels in enumerate(self.net.space.coupling.axes.get(node, [])):
            if labels is not None and not (mask := self._retained[labels]).all():
                index = torch.from_numpy(np.flatnonzero(mask)).to(tensor.device)
                tensor = tensor.index_select(axis, index)
        size = self.kernels.get(name, 0)
        for axis in range(2, tensor.dim()) if size else ():
            margin = (tensor.shape[axis] - size) // 2
            if margin:
                tensor = tensor.narrow(axis, margin, size)
        self._tensors[name] = tensor if tensor.is_contiguous() else tensor.contiguous()
        return self._tensors[name]

    def call(
        self, node: Node, training: bool = False
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return the function, arguments and keywords of an operator in this sub-network."""
        name, target = op_name(node), node.target
        args, kwargs = list(node.args), dict(node.kwargs)
        axes = self.net.space.coupling.axes

        def put(number: int, value: Any) -> None:
            schema: Any = getattr(target, "_schema", None)
            while len(args) <= number:
                args.append(argument(node, len(args)))
            args[number] = value
            kwargs.pop(schema.arguments[number].name, None)

        source: Any = args[0] if args else None
        if name.startswith("conv"):
            weight: Any = args[1]
            if argument(node, 6, 1) > 1 and "transpose" not in name:
                inner = self.shape(source)[1]
                put(6, inner // self.shape(weight)[1])
            if size := self.kernels.get(str(weight.target)):
                dims = node.meta["val"].dim() - 2
                dilation = (list(argument(node, 5)) * dims)[:dims]
                put(4, [d * (size - 1) // 2 for d in dilation])
        elif name in (VIEWS - {"flatten"}) | {"expand"}:
            number = 2 if name == "unflatten" else 1
            put(number, self._sizes(node, argument(node, number), name))
        elif name in FACTORIES:
            number = FACTORIES[name]
            put(number, self._sizes(node, argument(node, number), "expand"))
        elif name in ("split", "split_with_sizes", "chunk"):
            axis = int(argument(node, 2, 0)) % argument(node, 0).meta["val"].dim()
            if axes[source][axis] is not None:
                sizes = [self.count(part[axis], 0) for part in axes[node]]
                return _aten.split_with_sizes.default, (source, sizes, axis), {}
        elif name == "slice":
            axis = int(argument(node, 1, 0)) % node.meta["val"].dim()
            labels = axes[source][axis]
            start, end, step = (argument(node, n) for n in (2, 3, 4))
            if labels is not None and not isinstance(start, Node) and not isinstance(end, Node):
                mask = self._retained[labels]
                put(4, step)
                put(2, int(mask[:start].sum()) if start else 0)
                put(3, int(mask[:end].sum()))
        elif name in ("layer_norm", "rms_norm"):
            put(1, list(self.shape(node)[-len(argument(node, 1)) :]))
        elif name == "batch_norm":
            if training:
                put(3, None)
                put(4, None)
            put(5, training)
        elif name == "dropout":
            put(2, training)
        elif name in RECURRENT:
            put(6, training)
        return target, tuple(args), kwargs

    def _sizes(self, node: Node, sizes: Any, name: str) -> list[Any]:
        """Return the sizes of a view in this sub-network; -1 for its only symbolic one."""
        axes = self.net.space.coupling.axes[node]
        offset = 0
        if name == "unflatten":
            offset = int(argument(node, 1)) % argument(node, 0).meta["val"].dim()
        found = [
            size if isinstance(size, Node) or size == -1 else self.count(axes[offset + n], size)
            for n, size in enumerate(sizes)
        ]
        symbolic = [n for n, size in enumerate(found) if isinstance(size, Node)]
        if name in VIEWS and -1 not in found and len(symbolic) == 1:
            found[symbolic[0]] = -1
        return found

    def module(self) -> GraphModule:
        """Return this sub-network as a plain module with copies of its weights."""
        root = nn.Module()
        graph = Graph()
        copies: dict[Node, Node] = {}
        made: set[str] = set()
        for node in self.net.nodes:
            if node in self.unused:
                continue
            if node in self.skipped:
                copies[node] = copies[self.skipped[node]]
            elif node.op == "get_attr":
                copies[node] = graph.get_attr(str(node.target))
                if str(node.target) not in made:
                    made.add(str(node.target))
                    attach(root, str(node.target), self._copied(node))
            elif node.op == "call_function":
                target, args, kwargs = self.call(node)
                layer = _layer(node, args, self)
                if layer is not None:
                    path = owner_of(node)
                    if not _is_torch_layer(node):
                        path = f"{path}.{node.name}_layer".lstrip(".")
                    attach(root, path, layer)
                    copies[node] = graph.call_module(path, (copies[args[0]],))
                else:
                    mapped = torch.fx.map_arg((args, kwargs), copies.__getitem__)
                    copies[node] = graph.call_function(target, *mapped)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        for unused in reversed(graph.nodes):
            if not unused.users and unused.op not in ("placeholder", "output"):
                graph.erase_node(unused)
        return GraphModule(root, graph, "Subnet").eval()

    def _copied(self, node: Node) -> torch.Tensor:
        copied = self.tensor(node).detach().clone()
        whole = self.net.tensor(str(node.target))
        # Without gradients, a slice of a parameter does not require any.
        is_parameter = isinstance(whole, nn.Parameter)
        return nn.Parameter(copied, whole.requires_grad) if is_parameter else copied


def attach(root: nn.Module, path: str, value: nn.Module | torch.Tensor) -> None:
    """Register a layer, parameter or buffer of `root` under a qualified name."""
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    if isinstance(value, nn.Module | nn.Parameter):
        setattr(root, name, value)
    else:
        root.register_buffer(name, value)


def _is_torch_layer(node: Node) -> bool:
    """Whether a module of torch.nn itself runs `node`."""
    stack = node.meta.get("nn_module_stack") or {}
    return any(str(kind).startswith("torch.nn.modules.") for _, kind in list(stack.values())[-1:])


def _layer(node: Node, args: tuple[Any, ...], subnet: Subnet) -> nn.Module | None:
    """Return the layer of torch.nn that computes an operator; None if it stays a function."""
    name = op_name(node)
    if name == "dropout":
        return nn.Dropout(args[1])
    tensors = [a for a in args[1:] if isinstance(a, Node)]
    if not _is_torch_layer(node) or any(t.op != "get_attr" for t in tensors):
        return None
    full = [argument(node, n) if n >= len(args) else args[n] for n in range(10)]
    weight = subnet.tensor(full[1]) if isinstance(full[1], Node) else None
    layer: nn.Module
    if name in ("conv1d", "conv2d", "conv3d") and weight is not None:
        kind: Any = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}[name]
        dims = weight.dim() - 2
        stride, padding, dilation = (
            v if isinstance(v, str) else tuple((list(v) * dims)[:dims]) for v in full[3:6]
        )
        layer = kind(
            weight.shape[1] * full[6], weight.shape[0], tuple(weight.shape[2:]), stride, padding,
            dilation, full[6], full[2] is not None, device="meta",
        )  # fmt: skip
        pairs = {"weight": full[1], "bias": full[2]}
    elif name == "linear" and weight is not None:
        layer = nn.Linear(weight.shape[1], weight.shape[0], full[2] is not None, device="meta")
        pairs = {"weight": full[1], "bias": full[2]}
    elif name == "batch_norm" and weight is not None and isinstance(full[3], Node):
        dims = node.meta["val"].dim()
        norm: Any = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(dims, nn.BatchNorm1d)
        layer = norm(len(weight), eps=full[7], momentum=full[6])
        pairs = {"weight": full[1], "bias": full[2], "running_mean": full[3],
                 "running_var": full[4]}  # fmt: skip
    else:
        return None
    for key, source in pairs.items():
        if isinstance(source, Node):
            # A weight that other layers use, too, stays one tensor.
            value = subnet._copied(source)
            is_parameter = isinstance(value, nn.Parameter)
            if str(source.target) != f"{owner_of(node)}.{key}" or is_parameter == (
                key in ("running_mean", "running_var")
            ):
                return None
            setattr(layer, key, value)
        elif getattr(layer, key, None) is not None:
            return None
    return layer
