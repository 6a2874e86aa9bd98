"""The guards of the node program and its folders, and of limits."""

from __future__ import annotations

from tests.proof.guards import Edit, Mutant

TRUST = ("tests/integration/nodes/test_trust.py", "tests/unit/remote/test_trust.py")

_BOOTSTRAP = "ugro.kernel.links.transport"
_TRUST = "ugro.node.home"
_LOADER = "ugro.node.loader"

LIMITS = ("tests/integration/runs/test_limits.py", "tests/unit/remote/test_cgroup.py")
_LIMITS = "ugro.node.runs.run_state"
_RANKS = "ugro.node.runs.ranks"

_SLOWLY = "\n            self.start("
_INSTALL = '    names["install"](data)'
_BESIDE = '    sys.path.insert(0, os.path.join(root, ".ugro", "program"))'

MUTANTS = (
    Mutant(
        "the hash of the kept program is not compared",
        (
            Edit(
                _BOOTSTRAP,
                "",
                '\'\\nimport os, signal, sys\\ndef say(text): os.write(1, ("UGRO1 " + A["nonce"] '
                '+ " " + text + "\\\\n").encode("ascii", "replace"))\\ndef newer():\\n    for min'
                'or in range(14, 8, -1):\\n        for folder in os.environ.get("PATH", "").split'
                '(":"):\\n            path = os.path.join(folder, "python3.%d" % minor)\\n       '
                '     if os.access(path, os.X_OK): return path\\ndef is_whole(data):\\n    # Pyth'
                'on\\\'s own SHA-256 first: hashlib would load OpenSSL.\\n    for name in ("_sha2'
                '", "_sha256", "hashlib"):\\n        try: return __import__(name).sha256(data).he'
                'xdigest() == A["digest"]\\n        except ImportError: pass\\ndef read(fd):\\n  '
                '  data = b""\\n    while len(data) < A["size"]:\\n        part = os.read(fd, A["'
                'size"] - len(data))\\n        if not part: break\\n        data += part\\n    re'
                'turn data\\ndef kept(path):\\n    # Whatever was put there: nothing is waited fo'
                'r, and nothing is believed but the hash of the bytes that will run.\\n    try:\\'
                'n        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_C'
                'LOEXEC)\\n        try: data = read(fd)\\n        finally: os.close(fd)\\n    exc'
                'ept OSError: return b""\\n    return data if is_whole(data) else b""\\ndef recei'
                've():\\n    say("want")\\n    data = read(0)\\n    if len(data) < A["size"]: os.'
                '_exit(1)\\n    if not is_whole(data):\\n        say("damaged"); os._exit(1)\\n  '
                '  return data\\ndef start():\\n    import json\\n    root = os.path.expanduser(A'
                '["root"])\\n    if "{user}" in root:\\n        import pwd\\n        root = root.'
                'replace("{user}", pwd.getpwuid(os.geteuid()).pw_name)\\n    data, received = kep'
                't(os.path.join(root, ".ugro", "program", A["name"])), b""\\n    if not data: dat'
                'a = received = receive()\\n    names = {"__name__": "loader"}\\n    exec(A["load'
                'er"], names)\\n    names["install"](data)\\n    from ugro.node import home\\n   '
                ' try: home.settle(root, A["name"], received, A["nonce"])\\n    except home.Unsaf'
                'e as error:\\n        say("unsafe " + json.dumps(error.fields())); os._exit(1)\\'
                'n    except OSError as error:\\n        say("os-error %d %s" % (error.errno or 0'
                ', root)); os._exit(1)\\n    os.environ.update(A["env"])\\n    from ugro.node.mai'
                'n import main\\n    signal.alarm(0)\\n    main(root, A["nonce"], A["silence_s"],'
                ' A["node"])\\n# If the agent disappears in the middle of this, there is nothing '
                'left to report to.\\nsignal.alarm(60)\\nif sys.version_info >= (3, 9): start()\\'
                'nelif newer() and "again" not in A:\\n    A["again"] = 1\\n    path = newer()\\n'
                '    # In the environment, which others cannot read: A may hold secrets of the no'
                'de\\\'s own env.\\n    os.environ["UGRO_STAGE"] = "S = %r\\\\nA = %r\\\\nexec(S)'
                '" % (S, A)\\n    code = "import sys; del sys.path[0]; import os; exec(os.environ'
                '.pop(\\\'UGRO_STAGE\\\'))"\\n    os.execv(path, [path, "-E", "-s", "-S", "-c", c'
                'ode])\\nelse:\\n    say("old-python %d.%d %s" % (sys.version_info[0], sys.versio'
                "n_info[1], sys.executable)); os._exit(1)\\n'",
                '\'\\nimport os, signal, sys\\ndef say(text): os.write(1, ("UGRO1 " + A["nonce"] '
                '+ " " + text + "\\\\n").encode("ascii", "replace"))\\ndef newer():\\n    for min'
                'or in range(14, 8, -1):\\n        for folder in os.environ.get("PATH", "").split'
                '(":"):\\n            path = os.path.join(folder, "python3.%d" % minor)\\n       '
                '     if os.access(path, os.X_OK): return path\\ndef is_whole(data):\\n    # Pyth'
                'on\\\'s own SHA-256 first: hashlib would load OpenSSL.\\n    for name in ("_sha2'
                '", "_sha256", "hashlib"):\\n        try: return __import__(name).sha256(data).he'
                'xdigest() == A["digest"]\\n        except ImportError: pass\\ndef read(fd):\\n  '
                '  data = b""\\n    while len(data) < A["size"]:\\n        part = os.read(fd, A["'
                'size"] - len(data))\\n        if not part: break\\n        data += part\\n    re'
                'turn data\\ndef kept(path):\\n    # Whatever was put there: nothing is waited fo'
                'r, and nothing is believed but the hash of the bytes that will run.\\n    try:\\'
                'n        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_C'
                'LOEXEC)\\n        try: data = read(fd)\\n        finally: os.close(fd)\\n    exc'
                'ept OSError: return b""\\n    return data\\ndef receive():\\n    say("want")\\n '
                '   data = read(0)\\n    if len(data) < A["size"]: os._exit(1)\\n    if not is_wh'
                'ole(data):\\n        say("damaged"); os._exit(1)\\n    return data\\ndef start()'
                ':\\n    import json\\n    root = os.path.expanduser(A["root"])\\n    if "{user}"'
                ' in root:\\n        import pwd\\n        root = root.replace("{user}", pwd.getpw'
                'uid(os.geteuid()).pw_name)\\n    data, received = kept(os.path.join(root, ".ugro'
                '", "program", A["name"])), b""\\n    if not data: data = received = receive()\\n'
                '    names = {"__name__": "loader"}\\n    exec(A["loader"], names)\\n    names["i'
                'nstall"](data)\\n    from ugro.node import home\\n    try: home.settle(root, A["'
                'name"], received, A["nonce"])\\n    except home.Unsafe as error:\\n        say("'
                'unsafe " + json.dumps(error.fields())); os._exit(1)\\n    except OSError as erro'
                'r:\\n        say("os-error %d %s" % (error.errno or 0, root)); os._exit(1)\\n   '
                ' os.environ.update(A["env"])\\n    from ugro.node.main import main\\n    signal.'
                'alarm(0)\\n    main(root, A["nonce"], A["silence_s"], A["node"])\\n# If the agen'
                't disappears in the middle of this, there is nothing left to report to.\\nsignal'
                '.alarm(60)\\nif sys.version_info >= (3, 9): start()\\nelif newer() and "again" n'
                'ot in A:\\n    A["again"] = 1\\n    path = newer()\\n    # In the environment, w'
                "hich others cannot read: A may hold secrets of the node\\'s own env.\\n    os.en"
                'viron["UGRO_STAGE"] = "S = %r\\\\nA = %r\\\\nexec(S)" % (S, A)\\n    code = "imp'
                'ort sys; del sys.path[0]; import os; exec(os.environ.pop(\\\'UGRO_STAGE\\\'))"\\'
                'n    os.execv(path, [path, "-E", "-s", "-S", "-c", code])\\nelse:\\n    say("old'
                '-python %d.%d %s" % (sys.version_info[0], sys.version_info[1], sys.executable));'
                " os._exit(1)\\n'",
            ),
        ),
        TRUST,
    ),
    Mutant(
        "a module beside the program is found first",
        (
            Edit(_LOADER, "install", "0", "99"),
            Edit(
                _BOOTSTRAP,
                "",
                '\'\\nimport os, signal, sys\\ndef say(text): os.write(1, ("UGRO1 " + A["nonce"] '
                '+ " " + text + "\\\\n").encode("ascii", "replace"))\\ndef newer():\\n    for min'
                'or in range(14, 8, -1):\\n        for folder in os.environ.get("PATH", "").split'
                '(":"):\\n            path = os.path.join(folder, "python3.%d" % minor)\\n       '
                '     if os.access(path, os.X_OK): return path\\ndef is_whole(data):\\n    # Pyth'
                'on\\\'s own SHA-256 first: hashlib would load OpenSSL.\\n    for name in ("_sha2'
                '", "_sha256", "hashlib"):\\n        try: return __import__(name).sha256(data).he'
                'xdigest() == A["digest"]\\n        except ImportError: pass\\ndef read(fd):\\n  '
                '  data = b""\\n    while len(data) < A["size"]:\\n        part = os.read(fd, A["'
                'size"] - len(data))\\n        if not part: break\\n        data += part\\n    re'
                'turn data\\ndef kept(path):\\n    # Whatever was put there: nothing is waited fo'
                'r, and nothing is believed but the hash of the bytes that will run.\\n    try:\\'
                'n        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_C'
                'LOEXEC)\\n        try: data = read(fd)\\n        finally: os.close(fd)\\n    exc'
                'ept OSError: return b""\\n    return data if is_whole(data) else b""\\ndef recei'
                've():\\n    say("want")\\n    data = read(0)\\n    if len(data) < A["size"]: os.'
                '_exit(1)\\n    if not is_whole(data):\\n        say("damaged"); os._exit(1)\\n  '
                '  return data\\ndef start():\\n    import json\\n    root = os.path.expanduser(A'
                '["root"])\\n    if "{user}" in root:\\n        import pwd\\n        root = root.'
                'replace("{user}", pwd.getpwuid(os.geteuid()).pw_name)\\n    data, received = kep'
                't(os.path.join(root, ".ugro", "program", A["name"])), b""\\n    if not data: dat'
                'a = received = receive()\\n    names = {"__name__": "loader"}\\n    exec(A["load'
                'er"], names)\\n    names["install"](data)\\n    from ugro.node import home\\n   '
                ' try: home.settle(root, A["name"], received, A["nonce"])\\n    except home.Unsaf'
                'e as error:\\n        say("unsafe " + json.dumps(error.fields())); os._exit(1)\\'
                'n    except OSError as error:\\n        say("os-error %d %s" % (error.errno or 0'
                ', root)); os._exit(1)\\n    os.environ.update(A["env"])\\n    from ugro.node.mai'
                'n import main\\n    signal.alarm(0)\\n    main(root, A["nonce"], A["silence_s"],'
                ' A["node"])\\n# If the agent disappears in the middle of this, there is nothing '
                'left to report to.\\nsignal.alarm(60)\\nif sys.version_info >= (3, 9): start()\\'
                'nelif newer() and "again" not in A:\\n    A["again"] = 1\\n    path = newer()\\n'
                '    # In the environment, which others cannot read: A may hold secrets of the no'
                'de\\\'s own env.\\n    os.environ["UGRO_STAGE"] = "S = %r\\\\nA = %r\\\\nexec(S)'
                '" % (S, A)\\n    code = "import sys; del sys.path[0]; import os; exec(os.environ'
                '.pop(\\\'UGRO_STAGE\\\'))"\\n    os.execv(path, [path, "-E", "-s", "-S", "-c", c'
                'ode])\\nelse:\\n    say("old-python %d.%d %s" % (sys.version_info[0], sys.versio'
                "n_info[1], sys.executable)); os._exit(1)\\n'",
                '\'\\nimport os, signal, sys\\ndef say(text): os.write(1, ("UGRO1 " + A["nonce"] '
                '+ " " + text + "\\\\n").encode("ascii", "replace"))\\ndef newer():\\n    for min'
                'or in range(14, 8, -1):\\n        for folder in os.environ.get("PATH", "").split'
                '(":"):\\n            path = os.path.join(folder, "python3.%d" % minor)\\n       '
                '     if os.access(path, os.X_OK): return path\\ndef is_whole(data):\\n    # Pyth'
                'on\\\'s own SHA-256 first: hashlib would load OpenSSL.\\n    for name in ("_sha2'
                '", "_sha256", "hashlib"):\\n        try: return __import__(name).sha256(data).he'
                'xdigest() == A["digest"]\\n        except ImportError: pass\\ndef read(fd):\\n  '
                '  data = b""\\n    while len(data) < A["size"]:\\n        part = os.read(fd, A["'
                'size"] - len(data))\\n        if not part: break\\n        data += part\\n    re'
                'turn data\\ndef kept(path):\\n    # Whatever was put there: nothing is waited fo'
                'r, and nothing is believed but the hash of the bytes that will run.\\n    try:\\'
                'n        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_C'
                'LOEXEC)\\n        try: data = read(fd)\\n        finally: os.close(fd)\\n    exc'
                'ept OSError: return b""\\n    return data if is_whole(data) else b""\\ndef recei'
                've():\\n    say("want")\\n    data = read(0)\\n    if len(data) < A["size"]: os.'
                '_exit(1)\\n    if not is_whole(data):\\n        say("damaged"); os._exit(1)\\n  '
                '  return data\\ndef start():\\n    import json\\n    root = os.path.expanduser(A'
                '["root"])\\n    if "{user}" in root:\\n        import pwd\\n        root = root.'
                'replace("{user}", pwd.getpwuid(os.geteuid()).pw_name)\\n    data, received = kep'
                't(os.path.join(root, ".ugro", "program", A["name"])), b""\\n    if not data: dat'
                'a = received = receive()\\n    names = {"__name__": "loader"}\\n    exec(A["load'
                'er"], names)\\n    sys.path.insert(0, os.path.join(root, ".ugro", "program"))\\n'
                '    names["install"](data)\\n    from ugro.node import home\\n    try: home.sett'
                'le(root, A["name"], received, A["nonce"])\\n    except home.Unsafe as error:\\n '
                '       say("unsafe " + json.dumps(error.fields())); os._exit(1)\\n    except OSE'
                'rror as error:\\n        say("os-error %d %s" % (error.errno or 0, root)); os._e'
                'xit(1)\\n    os.environ.update(A["env"])\\n    from ugro.node.main import main\\'
                'n    signal.alarm(0)\\n    main(root, A["nonce"], A["silence_s"], A["node"])\\n#'
                ' If the agent disappears in the middle of this, there is nothing left to report '
                'to.\\nsignal.alarm(60)\\nif sys.version_info >= (3, 9): start()\\nelif newer() a'
                'nd "again" not in A:\\n    A["again"] = 1\\n    path = newer()\\n    # In the en'
                "vironment, which others cannot read: A may hold secrets of the node\\'s own env."
                '\\n    os.environ["UGRO_STAGE"] = "S = %r\\\\nA = %r\\\\nexec(S)" % (S, A)\\n   '
                ' code = "import sys; del sys.path[0]; import os; exec(os.environ.pop(\\\'UGRO_ST'
                'AGE\\\'))"\\n    os.execv(path, [path, "-E", "-s", "-S", "-c", code])\\nelse:\\n'
                '    say("old-python %d.%d %s" % (sys.version_info[0], sys.version_info[1], sys.e'
                "xecutable)); os._exit(1)\\n'",
            ),
        ),
        TRUST,
    ),
    Mutant(
        "what is in UGRO's folder is not looked at",
        (Edit(_TRUST, "prepare", "_entries(home)", "()"),),
        TRUST,
    ),
    Mutant(
        "the folders above are not looked at",
        (Edit(_TRUST, "_expect_above", "fault_above(found, account, _has_acl(path, found))", "None"),),
        TRUST,
    ),
    Mutant(
        "the mode of folders is not looked at",
        (Edit(_TRUST, "_writable", "found.st_mode & _OTHERS_WRITE", "False"),),
        TRUST,
    ),
    Mutant(
        "the owner of folders above is not looked at",
        (Edit(_TRUST, "fault_above", "found.st_uid != account.uid and found.st_uid not in account.roots", "False"),),
        TRUST,
    ),
    Mutant(
        "a link in the place of UGRO's folder is followed",
        (Edit(_TRUST, "fault_inside", "'link'", "None"),),
        TRUST,
    ),
    Mutant(
        "any group is taken for a private one",
        (Edit(_TRUST, "_writable", "found.st_gid != account.private_gid()", "False"),),
        TRUST,
    ),
    Mutant(
        "a rank of a limited run does not enter its group",
        (Edit(_LIMITS, "RunLimits._enter", "self._group.enter()", "pass"),),
        LIMITS,
    ),
    Mutant(
        "a rank that is started quickly has no limits",
        (Edit(_RANKS, "Rank.start_quickly", "self._enter is not None", "False"),),
        LIMITS,
    ),
    Mutant(
        "two runs get the same cores",
        (Edit(_LIMITS, "RunLimits._lock", "durable.lock_within(fd, fcntl.LOCK_EX, 0)", "True"),),
        LIMITS,
    ),
    Mutant(
        "a group is made and never removed",
        (Edit(_LIMITS, "RunLimits.end", "group.remove(_REMOVE_S)", "pass"),),
        LIMITS,
    ),
)
