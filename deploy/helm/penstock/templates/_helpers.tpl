{{- define "penstock.name" -}}
{{- if contains "penstock" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-penstock" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* Labels of a component: (list $ "frontend") */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Not of pods: a new version in their template would restart Redis and all frontends. */}}
{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version | replace "+" "_" }}
{{- end }}

{{/* An image of this repository: (list $ "penstock-api"), or with a tag of its own */}}
{{- define "penstock.image" -}}
{{- $root := index . 0 -}}
{{- $tag := "" }}
{{- if gt (len .) 2 }}{{ $tag = index . 2 }}{{ end -}}
{{ $root.Values.image.repository }}{{ index . 1 }}:{{ $tag | default $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end }}

{{- define "penstock.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "penstock.name" .) }}
{{- end }}

{{- define "penstock.redisSecret" -}}
{{ .Values.redis.existingSecret | default (printf "%s-redis" (include "penstock.name" .)) }}
{{- end }}

{{/* PENSTOCK_REDIS_URL, and what it is made of, as entries of `env`. */}}
{{- define "penstock.redisEnv" -}}
{{- if .Values.redis.bundled }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "penstock.redisSecret" . }}, key: password}}
- name: PENSTOCK_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "penstock.name" . }}-redis:6379/0
{{- else if .Values.redis.external.existingSecret }}
- name: PENSTOCK_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.external.existingSecret }}, key: url}}
{{- else }}
- name: PENSTOCK_REDIS_URL
  value: {{ required "redis.external.url or redis.external.existingSecret is needed where redis.bundled is false" .Values.redis.external.url | quote }}
{{- end }}
{{- end }}

{{/* Settings as entries of `env`. Numbers of a file of values have no exponent. */}}
{{- define "penstock.settingsEnv" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ if kindIs "float64" $value }}{{ if eq $value (floor $value) }}{{ printf "%.0f" $value | quote }}{{ else }}{{ $value | toString | quote }}{{ end }}{{ else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- end }}

{{/* Of OpenTelemetry, as entries of `env`: the same for all processes. */}}
{{- define "penstock.tracingEnv" -}}
{{- with .Values.tracing }}
{{- if .endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .endpoint | quote }}
{{- end }}
{{- with .headersSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom: {secretKeyRef: {name: {{ . }}, key: headers}}
{{- end }}
{{- include "penstock.settingsEnv" .settings }}
{{- end }}
{{- end }}

{{/* The first part of what all pods have. Variables that Kubernetes makes of Services
     (PENSTOCK_PORT=tcp://...) would be taken for settings. */}}
{{- define "penstock.pod" -}}
serviceAccountName: {{ include "penstock.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "penstock.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Variables of other programs, as Kubernetes writes them: a value, or a secret's entry. */}}
{{- define "penstock.extraEnv" -}}
{{- with .extraEnv }}{{ toYaml . }}{{ end }}
{{- end }}

{{- define "penstock.annotations" -}}
{{- with .podAnnotations }}
annotations: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "penstock.placement" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- end }}

{{/* The models as JSON, each over what `workers` has. `settings` are joined, so are the others. */}}
{{- define "penstock.models" -}}
{{- $models := list -}}
{{- range .Values.models -}}
{{- $model := mergeOverwrite (deepCopy $.Values.workers) . -}}
{{- $all := list $model.served -}}
{{- if $model.onDemand -}}
{{- if or (not $model.settings.PENSTOCK_MODEL) (regexMatch "[/,=]" $model.served) (eq $model.engine "http") -}}
{{- fail (printf "models, %s: workers with onDemand need settings.PENSTOCK_MODEL, a served name without '/', ',' and '=', and another engine than http." $model.name) -}}
{{- end -}}
{{- $listed := list (printf "%s=%s" $model.served $model.settings.PENSTOCK_MODEL) -}}
{{- range $model.onDemand -}}
{{- $all = append $all .served -}}
{{- $listed = append $listed (printf "%s=%s" .served .model) -}}
{{- end -}}
{{- $_ := set $model "settings" (omit $model.settings "PENSTOCK_MODEL") -}}
{{- $_ := set $model.settings "PENSTOCK_MODELS" (join "," $listed) -}}
{{- else if $model.settings.PENSTOCK_MODELS -}}
{{- fail (printf "models, %s: give the list as onDemand, not as PENSTOCK_MODELS: the chart needs the names." $model.name) -}}
{{- end -}}
{{- $models = append $models (set $model "allServed" $all) -}}
{{- end -}}
{{ toJson $models }}
{{- end }}
