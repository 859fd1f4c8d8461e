"""Logging in with a token of the API, and out."""

from __future__ import annotations

from starlette.responses import Response

from celery_ext.http.auth.rate_limit import RateLimit
from celery_ext.http.auth.tokens import Sessions

from ..visit import Form, Visit, set_cookie


class Login:
    """Login with a token, and logout."""

    def __init__(self, sessions: Sessions, seconds: int, rate_limit: RateLimit) -> None:
        self._sessions, self._seconds, self._rate_limit = sessions, seconds, rate_limit

    async def ask(self, visit: Visit) -> Response:
        return visit.render("login.html", {"next": visit.params().get("next"), "wrong": ""})

    async def begin(self, visit: Visit, form: Form) -> Response:
        """Log in, with a new secret for the browser: others may know its previous one."""
        begun = await visit.run(self._sessions.begin, form.one("token").strip())
        if begun is None:
            client = visit.request.client
            self._rate_limit.check(f"wrong tokens from {client.host if client else ''}")
            visit.note("login-refused")
            wrong = "This token is not known, was revoked or has expired."
            return visit.render("login.html", {"next": form.one("next"), "wrong": wrong}, 401)
        secret, token = begun
        visit.note("login", token.id)
        made = visit.redirect(_local(form.one("next")))
        set_cookie(visit, made, secret, self._seconds)
        return made

    async def end(self, visit: Visit, form: Form) -> Response:
        visit.note("logout")
        await visit.run(self._sessions.end, visit.request.cookies.get(visit.cookie, ""))
        made = visit.redirect("/login")
        made.delete_cookie(visit.cookie, path=visit.root or "/", httponly=True, samesite="strict")
        return made


def _local(target: str) -> str:
    """The target if it is a path of these pages, and not of another site; otherwise `/`."""
    is_path = target.startswith("/") and not target.startswith("//")
    return target if is_path and target.isprintable() and "\\" not in target else "/"
