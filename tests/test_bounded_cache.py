from dtensor_compile.bounded_cache import BoundedCache


def test_a_cache_forgets_all_before_it_has_one_item_too_many():
    cache = BoundedCache(2)
    cache["a"], cache["b"] = 1, 2
    assert cache == {"a": 1, "b": 2}
    cache["c"] = 3
    assert cache == {"c": 3} and "a" not in cache


def test_caches_do_not_share_what_they_know():
    one, other = BoundedCache(4), BoundedCache(4)
    one["a"] = 1
    assert not other
