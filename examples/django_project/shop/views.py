import json
from uuid import uuid4

from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_http_methods, require_POST

from .celery import app
from .tasks import remind


@csrf_exempt
@require_POST
def schedule(request: HttpRequest) -> HttpResponse:
    wanted, task_id = json.loads(request.body), str(uuid4())
    user_id, seconds = wanted["user_id"], wanted["seconds"]
    with transaction.atomic():
        # What is saved here and the reminder: both or neither.
        remind.apply_async_on_commit((user_id,), countdown=seconds, task_id=task_id)
    return JsonResponse({"id": task_id}, status=202)


@csrf_exempt
@require_http_methods(["GET", "DELETE"])
def reminder(request: HttpRequest, task_id: str) -> HttpResponse:
    if request.method == "DELETE":
        return HttpResponse(status=204 if app.delayed.cancel(task_id) else 404)
    info = app.delayed.get(task_id)
    if info is None:
        raise Http404("nothing is known of this reminder")
    return JsonResponse(info.as_dict())


urlpatterns = [
    path("reminders", schedule),
    path("reminders/<str:task_id>", reminder),
]
