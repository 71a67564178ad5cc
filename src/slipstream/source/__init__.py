"""Edits of the user's source by syntax tree, as unified diffs.

Every byte outside an edit is preserved: line endings, encoding, indentation, comments. An edit is
made completely or not at all: `EditLocationError` gives the reason if its place cannot be
determined, and `AlreadyAppliedError` reports that the source has it already.

A technique writes its `code` with `CodeChange.of`, which reads the workload's file, locates the
model, the optimizer and the loop, runs the edit, and turns both errors into notes::

    def code(self, workload):
        return CodeChange.of(
            workload,
            lambda where: where.after_model("{model} = {torch}.compile({model})"),
            by_hand="model = torch.compile(model)",
        )

The edit gets `Places` and returns a `Source`. In its lines ``{model}`` and ``{torch}`` represent
the names in the file (``self.net``, ``th``); ``import torch`` is added if it is missing.

=====================================================  ==========================================
``where.after_model("{model} = f({model})")``          lines after the statement that builds the
                                                       model, before the optimizer is made
``where.at_top("{torch}.set_num_threads(4)")``         lines after the imports
``where.set_call("torch.utils.data.DataLoader",        keyword arguments of a call of that qualified
num_workers="4")``                                     name, added or replaced: of the only one, of
                                                       the one that feeds the loop, or of all that
                                                       build parts of the model
``where.replace_class("torch.nn.Dropout",              another class wherever the model's code
"slipstream.nn.Dropout")``                             builds one or passes the class on
``where.set_optimizer(fused="True")``                  the same for the optimizer's constructor
``where.set_default("batch_size", "64")``              the default of the named function's argument
``where.before_return("{model}.eval()")``              lines before the function's ``return``
``where.wrap_forward("with f({model}):")``             a block around each forward pass of the loop,
                                                       from a model's call to the loss; without
                                                       training, around each call of the model
``accumulate(where, 4)``                               one update for four batches of the loop
``checkpoint_blocks(where)``                           the model's repeated blocks through
                                                       ``checkpoint``, where they are called
=====================================================  ==========================================

A script that trains through Hugging Face's ``Trainer``, Lightning, Accelerate or Fabric is edited
in the arguments of the framework's call if there is such a switch: `find_switch`. The model of
such a script is the one its trainer gets; the file has no training loop.

Each returns a `Source`. A second edit after it begins with ``where.on(source)``, which locates
everything again in the edited text. For other edits there are ``where.model`` (its ``name`` and
``statement``), ``where.optimizer`` (``call``, ``kind``), ``where.step`` (``container``,
``backward``, ``update``, ...), ``where.inputs`` (the model's inputs), ``where.returned`` (the
values that the function returns, by field), each a node of ``where.source.tree``; and the edits of
`Source` itself: ``insert_after``, ``insert_before``, ``replace``, ``surround``, ``set_keywords``,
``wrap``, ``with_import``. They take nodes of its ``tree`` and return a new `Source`; they may be
chained as long as they do not overlap::

    source = Source.read(Path("train.py"))
    where = locate(source, "make_workload")        # or None, for a plain script
    source = source.insert_after(where.model.statement, "model.requires_grad_(False)")
    print(source.diff())                           # source.text, source.content: the whole file
    written = write(source)                        # atomic, keeps train.py.orig
"""

from slipstream.source._accumulate import accumulate
from slipstream.source._attention import fuse_attention
from slipstream.source._batch_size import BatchSize, find_batch_size
from slipstream.source._blocks import checkpoint_blocks
from slipstream.source._frameworks import FrameworkEdit, find_switch
from slipstream.source._function import value_of
from slipstream.source._optimizer import Optimizer
from slipstream.source._places import Places, locate, refuse_inside
from slipstream.source._source import AlreadyAppliedError, EditLocationError, Source
from slipstream.source._write import UndoResult, WriteResult, undo, write

__all__ = [
    "AlreadyAppliedError",
    "BatchSize",
    "EditLocationError",
    "FrameworkEdit",
    "Optimizer",
    "Places",
    "Source",
    "UndoResult",
    "WriteResult",
    "accumulate",
    "checkpoint_blocks",
    "find_batch_size",
    "find_switch",
    "fuse_attention",
    "locate",
    "refuse_inside",
    "undo",
    "value_of",
    "write",
]
