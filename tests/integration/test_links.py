def test_smoke(cluster, ugro):
    r = ugro("health", "--json")
    print(r.stdout, r.stderr, r.returncode)
    r = ugro("exec", "@all", "--", "echo", "hi")
    print(r.stdout, r.stderr, r.returncode)
    assert 0
