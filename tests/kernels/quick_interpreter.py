"""Triton's interpreter, with less Python around every operation on a block: the kernels' tests take half the time.

A block of a test has a few hundred numbers, so nearly all the time goes into types: every operation makes a new type and a
new shape of constants for its result, and every comparison of types looks through all of them. Here what is made twice is
kept. Nothing changes in what numpy is asked to compute. The names are private ones of the Triton in constraints.txt; the
copies of its modules that are changed are the tests' own (conftest.py), and a GPU machine's tests have none.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any


def quicken(modules: dict[str, ModuleType]) -> None:
    """Once for the interpreted modules."""
    interpreter, core = modules["triton.runtime.interpreter"], modules["triton.language.core"]
    _check_no_overflow(interpreter)
    _keep_numpy_types(interpreter)
    _keep_shapes(core)
    _compare_types_by_identity_first(core)
    _keep_constants(modules["triton.language.semantic"].TritonSemantic)
    _cast_only_what_differs(modules["triton.language.semantic"].TritonSemantic, core.tensor)
    _pass_semantics_on(interpreter)


def _check_no_overflow(interpreter: Any) -> None:
    """Every + - * of integers is computed once more in 64 bits, for an assertion that is dropped without the option debug."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _keep_numpy_types(interpreter: Any) -> None:
    """A table of all types was built to look one up in."""
    look_up, found = interpreter._get_np_dtype, {}

    def kept(dtype: Any) -> Any:
        if dtype.name not in found:
            found[dtype.name] = look_up(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = kept


def _keep_shapes(core: Any) -> None:
    """Blocks of one shape share it, and the constants that tensors show of it."""
    constexpr, tensor, block_type = core.constexpr, core.tensor, core.block_type
    make, change = block_type.__init__, block_type.with_element_ty
    shapes: dict[tuple[int, ...], tuple[Any, ...]] = {}
    blocks: dict[tuple[int, int], Any] = {}
    nothing = (constexpr(1), core.tuple([]))

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, constexpr) else size for size in shape])
        if sizes not in shapes:
            make(self, element_ty, shape)
            shown = constexpr(self.numel), core.tuple([constexpr(size) for size in sizes])
            shapes[sizes] = self.shape, self.numel, str(self.shape), shown
        self.element_ty = element_ty
        self.shape, self.numel, text, self.shown = shapes[sizes]
        self.name = f"<{text}, {element_ty}>"

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        if self.element_ty is scalar_ty:
            return self
        key = id(self.shape), id(scalar_ty)  # both live on in the block
        if key not in blocks:
            blocks[key] = change(self, scalar_ty)
        return blocks[key]

    def make_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 (its callers name it)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.shown if type.is_block() else nothing

    block_type.__init__, block_type.with_element_ty, block_type.to_ir = make_block, with_element_ty, lambda self, builder: self
    tensor.__init__ = make_tensor


def _compare_types_by_identity_first(core: Any) -> None:
    """And look for a constant only in what may be one."""
    unwrap, plain = core._unwrap_if_constexpr, frozenset((core.tensor, core.dtype, core.block_type, int, float, bool))
    core._unwrap_if_constexpr = lambda o: o if type(o) in plain else unwrap(o)
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    core.dtype.is_int = lambda self: self.name in integers
    for kind in (core.dtype, core.pointer_type, core.block_type):

        def equal(self: Any, other: Any, compare: Any = kind.__eq__) -> bool:
            return self is other or compare(self, other)

        kind.__eq__ = equal


def _keep_constants(semantic: Any) -> None:
    """Numbers in a kernel, and the type that a number and a tensor, or two tensors, are computed in."""
    make, decide = semantic.scalar_constant, semantic.computation_type_impl
    constants: dict[tuple[Any, ...], Any] = {}
    types: dict[tuple[Any, ...], Any] = {}

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        if type(value) not in (int, bool) and (type(value) is not float or value == 0.0):  # 0.0 and -0.0 are equal, but not one
            return make(self, value, dtype)
        key = type(value), value, dtype.name
        if key not in constants:
            constants[key] = make(self, value, dtype)
        return constants[key]

    def computation_type(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in types:
            types[key] = decide(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return types[key]

    semantic.scalar_constant, semantic.computation_type_impl = scalar_constant, computation_type


def _cast_only_what_differs(semantic: Any, tensor: Any) -> None:
    """Two blocks of one type and shape need no cast and no broadcast; only division has types of its own."""
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def check_others(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        if type(lhs) is tensor and type(rhs) is tensor and lhs.type is rhs.type and not div_or_mod and not lhs.dtype.is_ptr():
            return lhs, rhs
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = check_others, broadcast_others


def _pass_semantics_on(interpreter: Any) -> None:
    """To the functions of the language, without a copy of every call's keywords."""
    semantic = interpreter.interpreter_semantic

    def replace(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(place, name, call)

    interpreter._patch_attr = replace
