"""The digests of a prompt's prefixes that a frontend names."""

from __future__ import annotations

from shared.prefixes import DIGEST_BYTES, PREFIX_STEP, digests_of_prompt, next_digest, root_digest


def digests(tenant: str, prompt: range) -> list[bytes]:
    joined = digests_of_prompt(tenant, prompt)
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


def test_a_digest_is_that_of_the_chain_over_whole_steps() -> None:
    first = next_digest(root_digest("t"), range(PREFIX_STEP))
    second = next_digest(first, range(PREFIX_STEP, 2 * PREFIX_STEP))
    assert digests("t", range(3 * PREFIX_STEP - 1)) == [first, second]
    assert digests("t", range(PREFIX_STEP - 1)) == []


def test_prompts_share_the_digests_of_what_they_share() -> None:
    shorter, longer = digests("t", range(5 * PREFIX_STEP)), digests("t", range(6 * PREFIX_STEP))
    assert longer[:5] == shorter
    other = digests_of_prompt("t", [*range(4 * PREFIX_STEP), *[7] * PREFIX_STEP])
    assert other.startswith(b"".join(shorter[:4]))
    assert not other.endswith(shorter[4])


def test_two_tenants_share_none() -> None:
    prompt = range(4 * PREFIX_STEP)
    assert not {*digests("a", prompt)} & {*digests("b", prompt)}


def test_of_a_long_prompt_16_are_kept_dense_at_both_ends() -> None:
    num_steps = 1000
    prompt = range(num_steps * PREFIX_STEP)
    chain, digest = [], root_digest("t")
    for step in range(num_steps):
        digest = next_digest(digest, prompt[step * PREFIX_STEP : (step + 1) * PREFIX_STEP])
        chain.append(digest)
    places = [chain.index(kept) for kept in digests("t", prompt)]
    assert places == [0, 1, 2, 4, 8, 16, 32, 64, 935, 967, 983, 991, 995, 997, 998, 999]


def test_an_adapter_shares_none_with_its_model_or_another() -> None:
    prompt = range(4 * PREFIX_STEP)
    names = ("", "ann", "bob")
    assert len({digests_of_prompt("t", prompt, name) for name in names}) == len(names)
